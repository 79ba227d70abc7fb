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
    stacks: Stacks = {}
    pieces: dict[Value, tuple[Value, ...]] = {}
    opened: set[Node] = set()
    for scans in _sharing(draft):
        opened.update(scans)
        read = list(dict.fromkeys(v for scan in scans for v in _stacked(scan)))
        prefix = common_parent([v.path for v in read])
        for value in read:
            rest = value.path[len(prefix) :].lstrip(".")
            names = tuple(f"{prefix or 'layer'}.{i}.{rest}" for i in range(value.shape[0]))
            stacks[value.path] = names
            pieces[value] = tuple(
                Value(value.shape[1:], value.dtype, "parameter", name, value.frozen)
                for name in names
            )
    if not opened:
        return draft, {}
    nodes: list[Node] = []
    instead: dict[Value, Operand] = {}
    draft = _added_up(draft, pieces)
    for value in pieces:
        if any(value in n.values and not _stacked(n) for n in draft.nodes):
            whole = replace(value, role="activation", path="", frozen=False)
            nodes.append(Node("stack", pieces[value], (whole,), {"dim": 0}))
            instead[value] = whole
    for node in draft.nodes:
        if _stacked(node) and _stacked(node)[0] in pieces:
            given = [instead.get(x, x) for x in node.values[: -len(_stacked(node))]]
            node = replace(node, inputs=(*given, *_stacked(node)))
            layers, results = _layers(node, pieces)
            nodes += layers
            instead.update(zip(node.outputs, results, strict=True))
            continue
        inputs = tuple(instead.get(x, x) if isinstance(x, Value) else x for x in node.inputs)
        nodes.append(replace(node, inputs=inputs))
    held = [p for v in draft.inputs for p in pieces.get(v, (v,))]
    frozen = [p for v, parts in pieces.items() if v.frozen for p in parts]
    outputs = tuple(instead.get(x, x) if isinstance(x, Value) else x for x in draft.outputs)
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
    whole = {v for n in draft.nodes for v in n.values[: len(n.values) - len(_stacked(n))]}
    return [scans for values, scans in groups if len(scans) > 1 or values & whole]


_BY_PLACE = ("square", "abs", "mul", "cast")


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
        if not steps:
            nodes.append(node)
            continue
        (stack,) = steps[0].values
        total: Operand | None = None
        for piece in pieces[stack]:
            made: Operand = piece
            for step in steps:
                last = step is node
                shape = node.out.shape if last else piece.shape
                attrs = dict(step.attrs)
                if last:
                    attrs["dims"], attrs["keepdim"] = tuple(range(len(piece.shape))), False
                    shape = ()
                out = Value(shape, step.out.dtype)
                inputs = tuple(made if isinstance(x, Value) else x for x in step.inputs)
                nodes.append(Node(step.kind, inputs, (out,), attrs, step.source))
                made = out
            if total is not None:
                out = Value((), node.out.dtype)
                nodes.append(Node("add", (total, made), (out,), {}, node.source))
                made = out
            total = made
        assert isinstance(total, Value)
        if node.out.shape:
            nodes.append(
                Node("reshape", (total,), node.outputs, {"shape": node.out.shape}, node.source)
            )
        else:
            nodes[-1] = replace(nodes[-1], outputs=node.outputs)
    return live(replace(draft, nodes=tuple(nodes)))


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
