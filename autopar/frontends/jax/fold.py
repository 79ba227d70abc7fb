"""Layers written out one after the other, folded into the block that they repeat.

Parameters of repeated layers differ in one integer of their path, ``blocks.3.up.weight``. An op
belongs to layer i when it depends on parameters of layer i and on none of a later one; layers whose
ops are equal, up to that integer, become one ``scan`` node. What only depends on constants is no
layer's. A layer that differs stands by itself, and so does one whose parameters are read outside of
it too: a block holds its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.frontends.jax.draft import Draft, Node, Operand, Value, live


@dataclass(frozen=True, slots=True)
class _Layer:
    """The ops of one instance: values from outside by position, and those read outside."""

    index: int
    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    parameters: tuple[tuple[str, Value], ...]
    outputs: tuple[Value, ...]
    signature: tuple[object, ...]


def folded(draft: Draft) -> Draft:
    """The draft with every list of equal layers as one node."""
    for prefix in _prefixes(draft):
        draft = _fold(draft, prefix)
    return draft


_INDEX = re.compile(r"0|[1-9][0-9]*")  # as indices are written: "01" is a key


def _prefixes(draft: Draft) -> list[str]:
    """Paths before an integer that takes at least two values, outermost first."""
    indices_of: dict[str, set[str]] = {}
    for value in draft.inputs:
        if value.role != "parameter":
            continue
        parts = value.path.split(".")
        for i, part in enumerate(parts[:-1]):
            if _INDEX.fullmatch(part):
                indices_of.setdefault(".".join(parts[:i]), set()).add(part)
                break
    return [prefix for prefix, indices in indices_of.items() if len(indices) > 1]


def _fold(draft: Draft, prefix: str) -> Draft:
    before = re.escape(f"{prefix}." if prefix else "")
    pattern = re.compile(rf"{before}({_INDEX.pattern})\.(.+)", re.DOTALL)
    owner: dict[Value, tuple[int, str]] = {}
    for value in draft.inputs:
        match = pattern.fullmatch(value.path) if value.role == "parameter" else None
        if match:
            owner[value] = (int(match[1]), match[2])
    level = _levels(draft, {v: i for v, (i, _) in owner.items()})
    indices = sorted({i for i, _ in owner.values()})
    members = {i: [n for n in draft.nodes if level[n] == i] for i in indices}
    if any(not members[i] for i in indices):
        return draft
    # The last level also holds what follows the layers; the last layer is as long as the others.
    last = indices[-1]
    members[last] = members[last][: len(members[indices[-2]])]
    layers = [_layer(i, members[i], draft, owner) for i in indices]
    if layers[-1].signature != layers[-2].signature:
        members[last] = _depending(
            draft, {v for v, (i, _) in owner.items() if i == last}, members[last]
        )
        layers[-1] = _layer(last, members[last], draft, owner)
    readers = draft.readers()
    runs: list[list[_Layer]] = []
    for layer in layers:
        if (
            runs
            and _chained(runs[-1][-1], layer, readers, draft)
            and (len(runs[-1]) == 1 or _wiring(*runs[-1][:2]) == _wiring(runs[-1][-1], layer))
        ):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    for run in runs:
        if len(run) > 1:
            draft = _replaced(draft, run, prefix)
    return draft


def _levels(draft: Draft, owned: dict[Value, int]) -> dict[Node, int]:
    """For each node the last layer that it depends on; -1 for none."""
    of: dict[Value, int] = dict(owned)
    levels: dict[Node, int] = {}
    for node in draft.nodes:
        levels[node] = max((of.get(v, -1) for v in node.values), default=-1)
        of.update((out, levels[node]) for out in node.outputs)
    return levels


def _depending(draft: Draft, parameters: set[Value], nodes: Sequence[Node]) -> list[Node]:
    """The ops up to the last one that reads a parameter of the layer itself."""
    reading = [i for i, n in enumerate(nodes) if any(v in parameters for v in n.values)]
    return list(nodes[: reading[-1] + 1]) if reading else []


def _layer(
    index: int, nodes: Sequence[Node], draft: Draft, owner: dict[Value, tuple[int, str]]
) -> _Layer:
    inside = {out for n in nodes for out in n.outputs}
    number: dict[Value, int] = {}
    inputs: dict[Value, int] = {}
    parameters: dict[str, Value] = {}
    rows: list[object] = []

    def tag(operand: Operand) -> object:
        if not isinstance(operand, Value):
            return _written(operand)
        if operand in inside:
            return ("made", number[operand])
        if operand in owner and owner[operand][0] == index:
            parameters[owner[operand][1]] = operand
            return ("own", owner[operand][1], operand.shape, operand.dtype)
        place = inputs.setdefault(operand, len(inputs))
        return ("given", place, operand.shape, operand.dtype)

    for node in nodes:
        operands = tuple(tag(x) for x in node.inputs)
        for out in node.outputs:
            number[out] = len(number)
        shapes = tuple((o.shape, o.dtype) for o in node.outputs)
        rows.append((node.kind, operands, _written(sorted(node.attrs.items())), shapes))
    own = set(nodes)
    read = {v for n in draft.nodes if n not in own for v in n.values}
    read.update(v for v in draft.outputs if isinstance(v, Value))
    outputs = tuple(v for v in number if v in read)
    signature = (tuple(rows), tuple(number[v] for v in outputs))
    return _Layer(index, tuple(nodes), tuple(inputs), tuple(parameters.items()), outputs, signature)


def _written(value: object) -> str:
    """A constant or the settings of an op to the last digit of every array in them: what is written
    alike is the same. Equality would take 0.0 for -0.0, and `repr` leaves out most of an array."""
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        return repr(value)


def _wiring(before: _Layer, after: _Layer) -> tuple[int | None, ...]:
    """Which output of ``before`` each input of ``after`` is; None for what stays the same."""
    made = {v: i for i, v in enumerate(before.outputs)}
    return tuple(made.get(v) for v in after.inputs)


def _chained(before: _Layer, after: _Layer, readers: dict[Value, list[Node]], draft: Draft) -> bool:
    """Equal layers, which alone read their parameters; each input of ``after`` is an output of
    ``before``, what that had there, or an entry of the batch as that had there; and nobody else
    reads what ``before`` gives."""
    if before.signature != after.signature:
        return False
    for layer in (before, after):
        own = set(layer.nodes)
        if any(v in draft.outputs or not own.issuperset(readers[v]) for _, v in layer.parameters):
            return False
    made, allowed = set(before.outputs), {*before.nodes, *after.nodes}
    if any(v in draft.outputs or not allowed.issuperset(readers[v]) for v in made):
        return False
    pairs = zip(before.inputs, after.inputs, strict=True)
    return made <= set(after.inputs) and all(
        b in made or b is a or a.role == b.role == "input" for a, b in pairs
    )


def _replaced(draft: Draft, run: Sequence[_Layer], prefix: str) -> Draft:
    """The layers of ``run`` as one node: constants first, then carries, then parameters."""
    first, last = run[0], run[-1]
    carried = _wiring(first, run[1])
    if sorted(i for i in carried if i is not None) != list(range(len(first.outputs))):
        return draft
    rows = [tuple(layer.inputs[p] for layer in run) for p in range(len(first.inputs))]
    fixed = [p for p, i in enumerate(carried) if i is None]
    fixed.sort(key=lambda p: len(set(rows[p])) > 1)  # what each layer has of its own is behind
    moving = sorted(
        (p for p, i in enumerate(carried) if i is not None), key=lambda p: carried[p] or 0
    )
    inner: dict[Value, Value] = {}
    body_inputs: list[Value] = []
    for value in [*(first.inputs[p] for p in (*fixed, *moving))]:
        inner[value] = Value(value.shape, value.dtype)
        body_inputs.append(inner[value])
    stacks = []
    base = f"{prefix}." if prefix else ""
    for rest, value in first.parameters:
        inner[value] = Value(value.shape, value.dtype, "parameter", f"{base}{rest}", value.frozen)
        body_inputs.append(inner[value])
        stacks.append(rest)
    body_nodes = []
    for node in first.nodes:
        for out in node.outputs:
            inner[out] = Value(out.shape, out.dtype)
        inputs = tuple(inner[x] if isinstance(x, Value) else x for x in node.inputs)
        outs = tuple(inner[o] for o in node.outputs)
        body_nodes.append(replace(node, inputs=inputs, outputs=outs))
    results = tuple(inner[v] for v in first.outputs)
    body = Draft(tuple(body_inputs), tuple(body_nodes), results)
    each = {inner[first.inputs[p]]: rows[p] for p in fixed if len(set(rows[p])) > 1}
    operands: list[Operand] = [first.inputs[p] for p in (*fixed, *moving)]
    # one operand per stacked parameter: the first layer's stands for all
    operands += [value for _, value in first.parameters]
    attrs = {
        "body": body,
        "length": len(run),
        "consts": len(fixed),
        "carries": len(moving),
        "each": each,
        "reverse": False,
        "instances": tuple(f"{base}{layer.index}" for layer in run),
    }
    call = Node("scan", tuple(operands), last.outputs, attrs, first.nodes[0].source)
    return _in_place(draft, run, call)


def _in_place(draft: Draft, run: Sequence[_Layer], call: Node) -> Draft:
    """``draft`` with ``call`` where the layers of ``run`` were."""
    gone = {n for layer in run for n in layer.nodes}
    place = draft.nodes.index(run[-1].nodes[-1])
    before = [n for n in draft.nodes[: place + 1] if n not in gone]
    after = [n for n in draft.nodes[place + 1 :] if n not in gone]
    own = set(call.outputs)
    late = []
    for node in before:  # what reads the layers' result but was written between their ops
        if own.intersection(node.values):
            late.append(node)
            own.update(node.outputs)
    nodes = [*(n for n in before if n not in late), call, *late, *after]
    read = {v for n in nodes for v in n.values}
    theirs = {v for layer in run[1:] for _, v in layer.parameters} - read
    left = tuple(v for v in draft.inputs if v not in theirs)
    return live(Draft(left, tuple(nodes), draft.outputs))
