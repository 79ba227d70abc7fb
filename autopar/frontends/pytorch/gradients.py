"""Through which tensors the loss's gradient flows, and whether it reaches every parameter.

A body is looked at once for each combination of operands that need gradients and results that are
used by the loss; two combinations make two blocks, since their backward passes differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.frontends.pytorch.calls import Kind, NotAlike
from autopar.frontends.pytorch.errors import LossError
from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.pytorch.program import Program

STORED = ("parameter", "buffer")
Flags = tuple[bool, ...]
Variant = tuple[int, Flags, Flags]  # body number, operands that need gradients, results that give


@dataclass(slots=True)
class Gradients:
    """The differentiable values of the top level and of every variant of every body."""

    top: set[Value]
    variants: dict[Variant, set[Value]] = field(default_factory=dict)
    of_call: dict[Node, Variant] = field(default_factory=dict)


def stop_gradients(program: Program) -> None:
    """Writes ``detach`` where a value enters ``no_grad``: the graph itself knows no such mode."""
    for body in program.bodies.values():
        body.nodes = _detached(body.nodes, [v for v in body.entries if v.is_float])
    program.nodes = _detached(program.nodes, [])


def _detached(nodes: list[Node], entries: list[Value]) -> list[Node]:
    if all(node.grad for node in nodes):
        return nodes
    needs = _forward(nodes, entries, lambda node, _: [v for v in node.outputs if v.is_float])
    made: list[Node] = []
    stopped: dict[Value, Value] = {}
    for node in nodes:
        for value in node.inputs if not node.grad and node.kind != "call" else ():
            if (value in needs or value.trainable) and value not in stopped:
                stopped[value] = Value(value.shape, value.dtype)
                made.append(Node("detach", [value], [stopped[value]], {}, node.source))
        if not node.grad:
            node.inputs = [stopped.get(v, v) for v in node.inputs]
        made.append(node)
    return made


def find_gradients(program: Program) -> Gradients:
    """Raises `LossError` where no gradient flows from the loss at all."""
    gradients = Gradients(set())

    def body_needs(node: Node, needs: set[Value]) -> Flags:
        body = program.bodies[node.attrs["number"]]
        flags = tuple(v in needs for v in node.inputs)
        inner = _forward(body.nodes, [v for v, f in zip(body.entries, flags, strict=True) if f])
        return tuple(v in inner for v in body.exits)

    memo: dict[tuple[int, Flags], Flags] = {}

    def call_needs(node: Node, needs: set[Value]) -> Iterable[Value]:
        key = (node.attrs["number"], tuple(v in needs for v in node.inputs))
        if key not in memo:
            memo[key] = body_needs(node, needs)
        return [v for v, f in zip(node.outputs, memo[key], strict=True) if f]

    needs = _forward(program.nodes, (), call_needs)
    if program.result not in needs:
        raise LossError(
            "no gradient flows from the loss to any parameter: it is computed under no_grad, is "
            "detached, or the model has no trainable parameter"
        )
    live: set[Value] = {program.result}
    for node in reversed(program.nodes):
        if node.kind == "call":
            body = program.bodies[node.attrs["number"]]
            given = tuple(v in needs for v in node.inputs)
            asked = tuple(v in live for v in node.outputs)
            variant = (body.number, given, asked)
            if variant not in gradients.variants:
                entries = [v for v, f in zip(body.entries, given, strict=True) if f]
                inner = _forward(body.nodes, entries)
                exits = [v for v, f in zip(body.exits, asked, strict=True) if f]
                gradients.variants[variant] = _backward(body.nodes, inner, exits)
            gradients.of_call[node] = variant
            flowing = gradients.variants[variant]
            live.update(v for v, e in zip(node.inputs, body.entries, strict=True) if e in flowing)
        elif any(v in live for v in node.outputs):
            live.update(v for v in node.inputs if v in needs)
    gradients.top = live & needs
    return gradients


def _forward(nodes: Iterable[Node], start: Iterable[Value], call: object = None) -> set[Value]:
    """Values that depend on a trainable parameter or on ``start`` in a differentiable way."""
    needs = set(start)
    for node in nodes:
        needs.update(v for v in node.inputs if v.trainable)
        if node.kind == "call":
            needs.update(call(node, needs))  # type: ignore[operator]
        elif node.grad and not _stops(node) and any(v in needs for v in node.inputs):
            needs.update(v for v in node.outputs if v.is_float)
    return needs


def _stops(node: Node) -> bool:
    return node.kind == "detach" or node.flat


def _backward(nodes: list[Node], needs: set[Value], exits: Iterable[Value]) -> set[Value]:
    live = {v for v in exits if v in needs}
    for node in reversed(nodes):
        if any(v in live for v in node.outputs):
            live.update(v for v in node.inputs if v in needs)
    return live & needs


def check_owners(program: Program, gradients: Gradients, kinds: Sequence[Kind]) -> None:
    """Raises `NotAlike` where a layer is part of two blocks, or of one and of the top level.

    As one that is called with other shapes too, or first with what has no gradient: each block
    would decide for itself how its parameters are held.
    """
    held: dict[str, Variant | None] = {
        v.name: None
        for node in program.nodes
        for v in node.inputs
        if node.kind != "call" and v.role in STORED
    }
    for call, variant in gradients.of_call.items():
        body = program.bodies[variant[0]]
        own = {v.name for node in body.nodes for v in node.inputs if v.role in STORED}
        for name in own:
            full = f"{call.attrs['instance']}{name.removeprefix(body.path)}"
            if held.setdefault(full, variant) != variant:
                group = kinds[body.number].group
                raise NotAlike(group, "a layer is part of two blocks", several=True)


def unreached(program: Program, gradients: Gradients, trainable: Iterable[str]) -> list[str]:
    """The trainable parameters that no gradient reaches, in the order given."""
    reached = {v.name for v in gradients.top if v.role == "parameter"}
    for call, variant in gradients.of_call.items():
        body = program.bodies[variant[0]]
        for value in gradients.variants[variant]:
            if value.role == "parameter":
                reached.add(f"{call.attrs['instance']}{value.name.removeprefix(body.path)}")
    return [name for name in trainable if name not in reached]
