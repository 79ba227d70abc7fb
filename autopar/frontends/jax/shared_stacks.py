"""Stacked layers that more is done with than one scan over them: towers that share weights, a
teacher beside adapters, a penalty on all weights.

A scan over stacked parameters is a block of its own, whose layers hold them. Parameters have one
holder; so where something else reads a stack too, its layers are written out, each reading its own
part of every stack, as a loop in Python would have them. `fold` then finds the layers of all scans
together. What reads a stack as a whole gets the parts put together; a sum over all of it is added
up layer by layer, so that a penalty becomes a part of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.frontends.jax.draft import Draft, Node, Operand, Value, live
from autopar.frontends.jax.naming import common_parent

Stacks = dict[str, tuple[str, ...]]
"""For each stacked parameter of the user's tree its names in the graph, one a layer."""


def written_out(draft: Draft) -> tuple[Draft, Stacks]:
    """The draft, and how the stacks are named that are no tensors in it any more."""
    pieces: dict[Value, tuple[Value, ...]] = {}
    for scans in _sharing(draft):
        read = list(dict.fromkeys(v for scan in scans for v in _stacked(scan)))
        prefix = common_parent([v.path for v in read])
        for value in read:
            rest = value.path[len(prefix) :].lstrip(".")
            pieces[value] = tuple(
                Value(value.shape[1:], value.dtype, "parameter", name, value.frozen)
                for name in (f"{prefix or 'layer'}.{i}.{rest}" for i in range(value.shape[0]))
            )
    if not pieces:
        return draft, {}
    draft = _added_up(draft, pieces)
    nodes: list[Node] = []
    instead: dict[Value, Operand] = {}
    whole = _read_whole(draft)
    for value in (v for v in pieces if v in whole):
        together = replace(value, role="activation", path="", frozen=False)
        nodes.append(Node("stack", pieces[value], (together,), {"dim": 0}))
        instead[value] = together

    def now(x: Operand) -> Operand:
        return instead.get(x, x) if isinstance(x, Value) else x

    for node in draft.nodes:
        stacked = _stacked(node)
        if not stacked or stacked[0] not in pieces:
            nodes.append(replace(node, inputs=tuple(map(now, node.inputs))))
            continue
        given = map(now, node.values[: -len(stacked)])
        layers, results = _layers(replace(node, inputs=(*given, *stacked)), pieces)
        nodes += layers
        instead.update(zip(node.outputs, results, strict=True))
    held = [p for v in draft.inputs for p in pieces.get(v, (v,))]
    frozen = [p for v, parts in pieces.items() if v.frozen for p in parts]
    outputs = tuple(map(now, draft.outputs))
    stacks = {value.path: tuple(p.path for p in parts) for value, parts in pieces.items()}
    return Draft((*held, *frozen), tuple(nodes), outputs), stacks


def _stacked(node: Node) -> tuple[Value, ...]:
    """The stacks whose layers a scan goes over; those of layers that were found are none."""
    if node.kind != "scan" or "instances" in node.attrs:
        return ()
    return node.values[node.attrs["consts"] + node.attrs["carries"] :]


def _sharing(draft: Draft) -> list[list[Node]]:
    """Scans that read a stack of another one, with all that do so among each other, and those whose
    stacks are read as a whole."""
    groups: list[tuple[set[Value], list[Node]]] = []
    for node in draft.nodes:
        if not (read := set(_stacked(node))):
            continue
        met = [group for group in groups if group[0] & read]
        groups = [group for group in groups if group not in met]
        values = read.union(*(values for values, _ in met))
        groups.append((values, [*(scan for _, scans in met for scan in scans), node]))
    whole = _read_whole(draft)
    return [scans for values, scans in groups if len(scans) > 1 or values & whole]


def _read_whole(draft: Draft) -> set[Value]:
    """What is read otherwise than layer by layer."""
    read = {v for n in draft.nodes for v in n.values[: len(n.values) - len(_stacked(n))]}
    return read.union(v for v in draft.outputs if isinstance(v, Value))


_BY_PLACE = ("square", "abs", "mul", "cast")
"""What a penalty makes of numbers before it sums them."""


def _added_up(draft: Draft, pieces: dict[Value, tuple[Value, ...]]) -> Draft:
    """Sums over all of a stack, of its numbers one by one, as sums over its layers."""
    maker, readers = draft.makers(), draft.readers()

    def chain(total: Node) -> list[Node]:
        """What makes the summed numbers of a stack, first to last; nothing where it does more."""
        x, steps = total.values[0], list[Node]()
        if len(total.attrs["dims"]) < len(x.shape):
            return []
        while x not in pieces:
            node = maker.get(x)
            if node is None or node.kind not in _BY_PLACE or len(node.values) != 1:
                return []
            if len(readers[x]) > 1 or x in draft.outputs:
                return []
            steps.insert(0, node)
            x = node.values[0]
        return [*steps, total]

    nodes: list[Node] = []
    for node in draft.nodes:
        steps = chain(node) if node.kind == "sum" else []
        if steps:
            nodes += _sums(steps, pieces[steps[0].values[0]])
        else:
            nodes.append(node)
    return live(replace(draft, nodes=tuple(nodes)))


def _sums(steps: Sequence[Node], pieces: Sequence[Value]) -> list[Node]:
    """``steps``, the last of which sums, for each of the pieces, added up one after the other."""
    total: Value | None = None
    nodes: list[Node] = []
    for piece in pieces:
        made = piece
        for step in steps:
            attrs, shape = dict(step.attrs), piece.shape
            if step is steps[-1]:
                attrs.update(dims=tuple(range(len(piece.shape))), keepdim=False)
                shape = ()
            out = Value(shape, step.out.dtype)
            inputs = tuple(made if isinstance(x, Value) else x for x in step.inputs)
            nodes.append(Node(step.kind, inputs, (out,), attrs, step.source))
            made = out
        if total is not None:
            out = Value((), made.dtype)
            nodes.append(Node("add", (total, made), (out,), {}, steps[-1].source))
            made = out
        total = made
    assert total is not None
    last = steps[-1]
    if not last.out.shape:
        return [*nodes[:-1], replace(nodes[-1], outputs=last.outputs)]
    return [*nodes, Node("reshape", (total,), last.outputs, {"shape": last.out.shape}, last.source)]


def _layers(
    scan: Node, pieces: dict[Value, tuple[Value, ...]]
) -> tuple[list[Node], Sequence[Operand]]:
    """The ops of all layers in their order, and what the scan gives."""
    body: Draft = scan.attrs["body"]
    consts, carries = scan.attrs["consts"], scan.attrs["carries"]
    each = scan.attrs.get("each", {})
    operands = scan.values
    carried: Sequence[Operand] = operands[consts : consts + carries]
    steps = range(scan.attrs["length"])
    nodes: list[Node] = []
    for layer in reversed(steps) if scan.attrs["reverse"] else steps:
        given: list[Operand] = [
            each[own][layer] if own in each else x
            for own, x in zip(body.inputs, operands[:consts], strict=False)
        ]
        given += [*carried, *(pieces[v][layer] for v in operands[consts + carries :])]
        inner: dict[Value, Operand] = dict(zip(body.inputs, given, strict=True))
        for node in body.nodes:
            outs = tuple(replace(o) for o in node.outputs)
            inputs = tuple(inner.get(x, x) if isinstance(x, Value) else x for x in node.inputs)
            nodes.append(replace(node, inputs=inputs, outputs=outs))
            inner.update(zip(node.outputs, outs, strict=True))
        carried = [inner.get(x, x) if isinstance(x, Value) else x for x in body.outputs]
    return nodes, carried
