"""The lifted ops cut into the top level and one body for each layer that repeats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.frontends.pytorch.calls import Kind, NotAlike
from autopar.frontends.pytorch.carried import check_own
from autopar.frontends.pytorch.ir import Node, Value, final, replace
from autopar.frontends.pytorch.lifter import Lifter


@dataclass(slots=True, eq=False)
class Body:
    """A repeated layer: its ops between ``entries`` and ``exits``.

    ``names`` are the entries' names; ``path`` is the instance whose ops these are.
    """

    number: int
    class_name: str
    path: str
    entries: list[Value]
    names: list[str]
    exits: list[Value]
    nodes: list[Node]


@dataclass(slots=True, eq=False)
class Program:
    """``nodes`` of the top level; a ``"call"`` has ``number`` and ``instance`` in its attrs."""

    nodes: list[Node]
    inputs: list[Value]
    result: Value
    bodies: dict[int, Body] = field(default_factory=dict)

    def calls(self, number: int) -> list[Node]:
        return [n for n in self.nodes if n.kind == "call" and n.attrs["number"] == number]


def cut(lifter: Lifter, kinds: list[Kind]) -> Program:
    """Splits at the marks. Raises `NotAlike` where a layer touches what is not handed to it."""
    assert lifter.result is not None
    _share_constants(lifter.nodes)
    nodes, bodies = _bodies(lifter.nodes, kinds)
    program = Program(nodes, lifter.inputs, lifter.result, bodies)
    places = {number: iter(kinds[number].paths) for number in bodies}
    for node in program.nodes:
        if node.kind == "call":
            node.attrs["instance"] = next(places[node.attrs["number"]])
    _check_closed(program, kinds)
    return program


def _bodies(nodes: list[Node], kinds: list[Kind]) -> tuple[list[Node], dict[int, Body]]:
    top: list[Node] = []
    bodies: dict[int, Body] = {}
    swap: dict[Value, Value] = {}
    entered: Node | None = None
    inside: list[Node] = []
    for node in nodes:
        node.inputs = [final(swap, v) for v in node.inputs]
        repeats = node.kind in ("enter", "leave") and len(kinds[node.attrs["number"]].paths) > 1
        if node.kind in ("enter", "leave") and not repeats:  # called once: part of the top level
            swap.update(zip(node.outputs, node.inputs, strict=True))
        elif node.kind == "enter":
            entered, inside = node, []
        elif node.kind == "leave":
            assert entered is not None
            kind = kinds[node.attrs["number"]]
            bodies[kind.number] = Body(
                kind.number, kind.class_name, kind.paths[0], list(entered.outputs),
                list(kind.argument_names), list(node.inputs), inside,
            )  # fmt: skip
            attrs = {"number": kind.number}
            top.append(Node("call", entered.inputs, node.outputs, attrs, node.source))
            made = {v for n in inside for v in n.outputs}
            # A hook may have handed on what was inside of the first call.
            swap.update((v, w) for v, w in zip(node.inputs, node.outputs, strict=True) if v in made)
            entered = None
        elif entered is not None:
            inside.append(node)
        else:
            top.append(node)
    return top, bodies


def _share_constants(nodes: list[Node]) -> None:
    """Gives every stretch between marks its own copy of the literal tensors that it reads."""
    literal = {n.output: n for n in nodes if n.kind == "constant"}
    if not literal:
        return
    rest = [n for n in nodes if n.kind != "constant"]
    nodes.clear()
    here: dict[Value, Value] = {}
    for node in rest:
        if node.kind in ("enter", "leave"):
            here = {}
        for value in node.inputs:
            if value in literal and value not in here:
                old = literal[value]
                copy = Value(value.shape, value.dtype)
                nodes.append(Node("constant", [], [copy], old.attrs, old.source))
                here[value] = copy
        node.inputs = [here.get(v, v) for v in node.inputs]
        nodes.append(node)


def _check_closed(program: Program, kinds: list[Kind]) -> None:
    """Bodies read their entries, the model's own tensors and what they make; nothing else leaks."""
    outside = {v for n in program.nodes for v in n.inputs} | {program.result}
    for body in program.bodies.values():
        made = {v for n in body.nodes for v in n.outputs}
        known = made | set(body.entries)
        group = kinds[body.number].group
        check_own(body.nodes, kinds[body.number])
        if made & outside:
            raise NotAlike(group, "a tensor of the layer is used outside without being returned")
        extra: list[Value] = []
        for value in (*(v for n in body.nodes for v in n.inputs), *body.exits):
            if value in known or value in extra:
                continue
            if value.role not in ("parameter", "buffer"):
                raise NotAlike(group, "the layer reads a tensor that is not handed to it")
            if not value.name.startswith(f"{body.path}.") or _is_shared(value, body, kinds):
                extra.append(value)
        _hand_in(program, body, extra)
        _give_names_to_entries(body)


def _is_shared(value: Value, body: Body, kinds: list[Kind]) -> bool:
    """Whether a tensor under the first instance's path is one tensor for all instances."""
    return value.name in kinds[body.number].shared


def _hand_in(program: Program, body: Body, extra: Iterable[Value]) -> None:
    """Makes tensors of the outer model that the body reads operands of every call."""
    for value in extra:
        entry = Value(value.shape, value.dtype, "input")
        replace(body.nodes, {value: entry})
        body.exits = [entry if v is value else v for v in body.exits]
        body.entries.append(entry)
        body.names.append(value.name)
        for call in program.calls(body.number):
            call.inputs.append(value)


def _give_names_to_entries(body: Body) -> None:
    """An entry that is handed straight out gets an op of its own, so that every exit is made."""
    given = set(body.entries)
    made = {v for n in body.nodes for v in n.outputs}
    exits = []
    for value in body.exits:
        if value in given or value not in made:
            copy = Value(value.shape, value.dtype)
            body.nodes.append(Node("identity", [value], [copy]))
            value = copy
        exits.append(value)
    body.exits = exits


def prune(program: Program) -> None:
    """Drops operands and results of calls that no body or reader needs."""
    read = {v for n in program.nodes for v in n.inputs} | {program.result}
    for body in program.bodies.values():
        calls = program.calls(body.number)
        used = {v for n in body.nodes for v in n.inputs}
        keep = [i for i, v in enumerate(body.entries) if v in used]
        body.entries = [body.entries[i] for i in keep]
        body.names = [body.names[i] for i in keep]
        for call in calls:
            call.inputs = [call.inputs[i] for i in keep]
        kept = [i for i in range(len(body.exits)) if any(c.outputs[i] in read for c in calls)]
        body.exits = [body.exits[i] for i in kept]
        for call in calls:
            call.outputs = [call.outputs[i] for i in kept]
