"""Tables of a program: its parameters and how each is cut, its blocks, leaves of several layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.emit.constants import holding, literal
from autopar.emit.jax.loops import last_alone, last_stack
from autopar.emit.jax.stages import instances_text
from autopar.emit.text import Lines, tuple_text
from autopar.lowering.lowered import Lowered, stored
from autopar.lowering.stages import StagePart


def parameters_table(lowered: Lowered) -> list[str]:
    rows = _parameter_rows(lowered, 4)
    return ["PARAMETERS = {", *rows, "}"] if rows else ["PARAMETERS: dict[str, Parameter] = {}"]


def _parameter_rows(lowered: Lowered, indent: int) -> list[str]:
    lines = Lines(indent)
    for name, value in lowered.tensors.items():
        tensor = value.tensor
        if tensor.role not in ("parameter", "buffer"):
            continue
        model = stored(value.produced)
        split = [model.split_axes(dim) for dim in range(len(tensor.shape))]
        last = max((dim for dim, axes in enumerate(split) if axes), default=-1)
        dims = (literal(_single(axes)) if axes else "None" for axes in split[: last + 1])
        deferred = tuple(a for a, p in model.placements if p.kind == "D")
        more = {
            f"P({', '.join(dims)})": any(split),
            f'dtype="{tensor.dtype}"': tensor.dtype != "float32",
            f"deferred={tuple_text(deferred)}": deferred,
            "buffer=True": tensor.role == "buffer",
            "frozen=True": not tensor.differentiable,
        }
        arguments = ", ".join([tuple_text(tensor.shape), *holding(more)])
        lines.add(f"{literal(name)}: Parameter({arguments}),")
    return lines.lines


def _single(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else axes


def blocks_table(lowered: Lowered, stages: Sequence[StagePart]) -> list[str]:
    if not lowered.blocks:
        return ["BLOCKS: dict[str, Block] = {}"]
    lines, rest = ["BLOCKS = {"], Lines(0)
    apart = frozenset() if stages else last_alone(lowered)
    alone_in_stages = {name for stage in stages for name in last_alone(stage.lowered)}
    for name, repeated in lowered.blocks.items():
        instances = tuple(dict.fromkeys(lowered.graph.blocks[name].instances))
        layers = instances[:-1] if name in apart else instances
        lines.append(f"    {literal(name)}: Block(")
        head = Lines(8)
        head.add(f"layers={instances_text(layers)},")
        lines += [*head.lines, "        parameters={", *_parameter_rows(repeated, 12)]
        lines += ["        },", "    ),"]
        if name in apart:
            alone = (
                f"layers=({literal(instances[-1])},), parameters=BLOCKS[{literal(name)}].parameters"
            )
            rest.add(f"BLOCKS[{literal(last_stack(name))}] = Block({alone})")
    for name in (name for name in lowered.blocks if name in alone_in_stages):
        rest.add(f"BLOCKS[{literal(last_stack(name))}] = BLOCKS[{literal(name)}]")
    return [*lines, "}", *rest.lines]


def stacks_table(stacks: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Which leaves of the user's tree hold several layers."""
    if not stacks:
        return []
    lines = Lines(4)
    for path, names in stacks.items():
        before, _, behind = names[0].partition(".0.")
        made = [f"{before}.{i}.{behind}" for i in range(len(names))]
        assert made == list(names), f"{path} holds {names}"
        lines.add(f"{literal(path)}: ({literal(before)}, {literal(behind)}),")
    note = (
        "# leaves of the tree of `init` that hold all layers: what stands around a layer's number"
    )
    return ["", note, "STACKS = {", *lines.lines, "}"]
