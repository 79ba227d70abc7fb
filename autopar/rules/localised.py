"""The graphs of composite ops on one rank's pieces, and of what stands inside of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.kinds import BODIES
from autopar.nouns.text.graph import from_text, to_text
from autopar.rules.bodies import bodies_of, body_indices
from autopar.rules.composite import Indices, indices_of, own_names

SIDES = ("forward", "backward")
Pieces = Callable[[str, int], int]
"""Into how many pieces a dim of a tensor is split."""


def localised(graph: Graph, side: str, indices: Indices, ways: Mapping[str, int]) -> Graph:
    """The graph on one rank's pieces; ``ways``: into how many pieces an index is split."""

    def pieces(name: str, d: int) -> int:
        return ways.get(indices.of[side, name, d], 1)

    def local(tensor: Tensor) -> Tensor:
        shape = tuple(size // pieces(tensor.name, d) for d, size in enumerate(tensor.shape))
        return replace(tensor, shape=shape)

    def op(given: Op) -> Op:
        attrs = dict(given.attrs)
        if "shape" in attrs:
            attrs["shape"] = local(graph.tensors[given.name]).shape
        return replace(given, attrs={**attrs, **_inside(given, graph.tensors, pieces)})

    return replace(
        graph,
        tensors={n: local(t) for n, t in graph.tensors.items()},
        ops=tuple(map(op, graph.ops)),
    )


def _inside(op: Op, tensors: Mapping[str, Tensor], pieces: Pieces) -> dict[str, Any]:
    """The attrs of a composite op that hold graphs, on the same pieces."""
    places = [(n, d) for n in (*op.inputs, *op.outputs) for d in range(len(tensors[n].shape))]
    if BODIES in op.attrs:
        indices, bodies = body_indices(op, tensors), bodies_of(op)
        ways = dict(_ways(op, own_names(op), places, indices, pieces))
        graphs = (localised(b.graph, str(i), indices, ways) for i, b in enumerate(bodies))
        return {BODIES: tuple(map(to_text, graphs))}
    if isinstance(op.attrs.get("forward"), str) and "gradients" in op.attrs:
        forward, backward = (from_text(op.attrs[side]) for side in SIDES)
        indices = indices_of(forward, backward, op.attrs["gradients"])
        ways = dict(_ways(op, [*forward.inputs, *forward.outputs], places, indices, pieces))
        both = zip(SIDES, (forward, backward), strict=True)
        return {side: to_text(localised(graph, side, indices, ways)) for side, graph in both}
    return {}


def _ways(
    op: Op,
    names: Sequence[str],
    places: Sequence[tuple[str, int]],
    indices: Indices,
    pieces: Pieces,
) -> Iterator[tuple[str, int]]:
    own = dict(zip((*op.inputs, *op.outputs), names, strict=True))
    for name, d in places:
        if pieces(name, d) > 1:
            yield indices.of["forward", own[name], d], pieces(name, d)
