"""The plan's shardings on the model's tree; repeated layers once. And what each op does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.lowering.lowered import BATCH_AXES, Lowered, LoweredTensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Placement, Sharding
from autopar.report.explained import Explained
from autopar.report.page.html import Markup, dotted, joined, section, table, tag
from autopar.report.units import duration, percent

OPEN_DEPTH = 3
"""Modules that are open when the page is."""


@dataclass(slots=True)
class Node:
    """A module: its parameters by their last name, and modules inside. ``note``: how often."""

    note: str = ""
    parameters: dict[str, LoweredTensor] = field(default_factory=dict)
    inside: dict[str, Node] = field(default_factory=dict)

    def at(self, path: Sequence[str]) -> Node:
        node = self
        for name in path:
            node = node.inside.setdefault(name, Node())
        return node


def model_tree(lowered: Lowered) -> Node:
    """Parameters of the model by module; a block stands where its first instance does."""
    top = Node()
    _add(top, lowered)
    for name, body in lowered.blocks.items():
        paths = list(dict.fromkeys(lowered.graph.blocks[name].instances))
        for parent, last in _parents(paths).items():
            label = last[0] if len(last) == 1 else f"{last[0]} … {last[-1]}"
            node = top.at([*(parent.split(".") if parent else []), label])
            node.note = f"{len(last)} x {name}" if len(last) > 1 else name
            _add(node, body)
    return top


def _parents(paths: Sequence[str]) -> dict[str, list[str]]:
    children: dict[str, list[str]] = {}
    for path in paths:
        parent, _, last = path.rpartition(".")
        children.setdefault(parent, []).append(last)
    return children


def _add(node: Node, lowered: Lowered) -> None:
    for name, tensor in lowered.tensors.items():
        if tensor.tensor.role == "parameter":
            *path, last = name.split(".")
            node.at(path).parameters[last] = tensor


def tree_section(lowered: Lowered, beside: str) -> Markup:
    """``beside``: what data axes split, in words."""
    note = (
        "Parameters as they are stored on the model axes: shape of the whole, what is split, shape "
        f"on one rank. {beside}."
    )
    return section(
        "Shardings on the model", *_children(model_tree(lowered), lowered.mesh, 0), note=note
    )


def _children(node: Node, mesh: Mesh, depth: int) -> Iterator[Markup]:
    for name, tensor in node.parameters.items():
        yield _leaf(name, tensor, mesh)
    for name, inside in node.inside.items():
        while len(inside.inside) == 1 and not inside.parameters and not inside.note:
            ((last, inside),) = inside.inside.items()
            name = f"{name}.{last}"
        if len(inside.parameters) == 1 and not inside.inside and not inside.note:
            ((last, tensor),) = inside.parameters.items()
            yield _leaf(f"{name}.{last}", tensor, mesh)
            continue
        note = tag("span", f"  {inside.note}", class_="soft") if inside.note else ""
        head = tag("summary", tag("code", name), note)
        body = _children(inside, mesh, depth + 1)
        yield tag("details", head, *body, open="" if depth < OPEN_DEPTH else None)


def _leaf(name: str, value: LoweredTensor, mesh: Mesh) -> Markup:
    tensor = value.tensor
    stored = Sharding(tuple(p for p in value.produced.placements if p[0] not in BATCH_AXES))
    local = stored.local_shape(tensor.shape, mesh)
    splits = [words(axis, placement) for axis, placement in stored.placements]
    split = local != tensor.shape
    text = "; ".join(splits) or "whole on every rank"
    if split:
        text += f": {_shape(local)}"
    whole = f"{_shape(tensor.shape)} {tensor.dtype}"
    if not tensor.differentiable:
        whole += ", frozen"
    return tag(
        "div",
        tag("code", name),
        tag("span", whole, class_="soft"),
        tag("span", text, class_="split" if split else "soft"),
        class_="leaf",
    )


def words(axis: str, placement: Placement) -> str:
    """``tp:S0`` for a reader."""
    if placement.kind == "S":
        return f"{axis} splits dim {placement.dim}"
    if placement.kind == "D":
        return f"whole over {axis}, gradients summed at the end"
    return f"whole over {axis}"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(f"{extent:,}" for extent in shape) or "one number"


def ops_section(rows: Sequence[Explained], step_time_s: float, ranks: int) -> Markup:
    """By block, ops that take time, the longest first; shares are of all ``ranks`` of a pipeline,
    which run different ops at once."""
    where = f", of all {ranks} pipeline ranks together" if ranks > 1 else ""
    blocks: dict[str, list[Explained]] = {}
    for row in rows:
        if row.compute_s + row.communication_s > 0:
            block, inside, _ = row.key.partition("::")
            blocks.setdefault(block if inside else "", []).append(row)
    return section(
        "What each op does",
        joined(_block(name, members, step_time_s * ranks) for name, members in blocks.items()),
        note=f"Times of a step{where}; the letter that each axis splits, as in explain.",
    )


def _block(name: str, members: Sequence[Explained], whole_s: float) -> Markup:
    total = sum(row.compute_s + row.communication_s for row in members)
    head = tag(
        "summary",
        tag("code", name) if name else "outside the blocks",
        tag("span", f"  {duration(total)}, {percent(total / whole_s)}", class_="soft"),
    )
    listed = [
        (
            dotted(row.key.removeprefix(f"{name}::")),
            duration(row.compute_s + row.communication_s),
            tag("code", row.way),
            joined(tag("div", str(move)) for move in row.moved),
        )
        for row in sorted(members, key=lambda r: -(r.compute_s + r.communication_s))
    ]
    return tag("details", head, table(("op", "a step", "strategy", "moves"), listed, ("a step",)))
