"""Masks that are made from constants, made again inside of the body that reads them."""

from __future__ import annotations

from autopar.frontends.jax.draft import Builder, Node, Operand, Uniform, Value

MOST_COPIED = 32
"""Ops of a mask that is made inside of a scan's body."""


def made_again(x: Operand, outside: Builder, inside: Builder) -> Operand | None:
    """``x`` made again in ``inside`` if it is a number or a mask made from constants."""
    if isinstance(x, Uniform):
        return x
    if x.dtype != "bool":
        return None
    nodes: list[Node] = []
    todo, seen = [x], set[Value]()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        node = outside.maker.get(value)
        if node is None or node.kind == "scan" or len(nodes) > MOST_COPIED:
            return None
        nodes.append(node)
        todo.extend(node.values)
    for node in sorted(set(nodes), key=outside.nodes.index):
        if node.out not in inside.maker:
            inside.append(node)
    return x
