"""Ops that do nothing or undo one another: gone, so that idioms stand out."""

from __future__ import annotations

from autopar.frontends.pytorch.ir import Links, Node, Value, final

Swap = dict[Value, Value]


def clean(nodes: list[Node], results: list[Value], *, casts: bool) -> list[Node]:
    """``nodes`` without no-ops; ``casts`` also drops casts to the dtype that a value has.

    Reshapes of reshapes become one; a matrix product works on the shape that its neighbours have.
    ``results`` is updated in place.
    """
    nodes = _products(nodes, results)
    swap: Swap = {}
    links = Links(nodes, results)
    for node in nodes:
        node.inputs = [final(swap, v) for v in node.inputs]
        if _does_nothing(node, casts):
            swap[node.output] = node.inputs[0]
        elif node.kind == "reshape":
            _skip_reshapes(node, links)
            if node.inputs[0].shape == node.output.shape:
                swap[node.output] = node.inputs[0]
    results[:] = [final(swap, v) for v in results]
    return [n for n in nodes if not (n.outputs and n.outputs[0] in swap)]


def _does_nothing(node: Node, casts: bool) -> bool:
    if len(node.inputs) != 1 or len(node.outputs) != 1 or node.inputs[0].shape != node.output.shape:
        return False
    if node.inputs[0].dtype != node.output.dtype:
        return False
    if node.kind == "cast":
        return casts
    other = node.attrs.get("other")
    if other is None or isinstance(other, bool):
        return False
    first = bool(node.attrs.get("scalar_first"))
    if node.kind == "add":
        return bool(other == 0)
    if node.kind == "mul":
        return bool(other == 1)
    return not first and other == {"sub": 0, "div": 1, "pow": 1}.get(node.kind)


def _skip_reshapes(node: Node, links: Links) -> None:
    while (inner := links.made_by(node.inputs[0], "reshape")) is not None:
        node.inputs = [inner.inputs[0]]
        node.attrs.pop("torch", None)


def _products(nodes: list[Node], results: list[Value]) -> list[Node]:
    """``linear(reshape(x))`` that is cut into [..., n] is ``linear(x)`` of x cut into [..., k].

    So rows that stood in one dim for the product alone stay apart; a bias goes along.
    ``x @ weight.T`` is ``linear`` too.
    """
    links = Links(nodes, results)
    swap: Swap = {}
    cut: dict[Node, Node] = {}
    for node in nodes:
        if node.kind == "linear_t" and (turned := links.made_by(node.inputs[1], "transpose")):
            node.kind, node.inputs = "linear", [node.inputs[0], turned.inputs[0]]
            node.attrs = {}
        if node.kind not in ("linear", "linear_t"):
            continue
        flat = links.made_by(node.inputs[0], "reshape")
        chain = [node]
        while (follow := _only_reader(links, chain[-1].output)) is not None:
            if not (follow.kind == "add" and follow.attrs.get("bias")):
                break
            chain.append(follow)
        readers = links.readers.get(chain[-1].output, [])
        if flat is None or not readers or chain[-1].output in links.results:
            continue
        whole, merged = flat.inputs[0], flat.output.shape
        shape = readers[0].output.shape
        if len(merged) != 2 or shape[-1:] != node.output.shape[-1:]:
            continue
        if not all(r.kind == "reshape" and r.output.shape == shape for r in readers):
            continue
        rows = (*shape[:-1], merged[-1])
        if whole.shape != rows:
            apart = Node("reshape", [whole], [Value(rows, whole.dtype)], {"shape": rows})
            apart.source, apart.grad = flat.source, flat.grad
            cut[node] = apart
            whole = apart.output
        node.inputs[0] = whole
        for link in chain:
            link.output.shape = shape
        for reader in readers:
            swap[reader.output] = chain[-1].output
    if not swap:
        return nodes
    results[:] = [final(swap, v) for v in results]
    every = [n for node in nodes for n in ([cut[node], node] if node in cut else [node])]
    kept = [n for n in every if not (n.outputs and n.outputs[0] in swap)]
    for node in kept:
        node.inputs = [final(swap, v) for v in node.inputs]
    return kept


def _only_reader(links: Links, value: Value) -> Node | None:
    return links.readers[value][0] if links.only(value) else None
