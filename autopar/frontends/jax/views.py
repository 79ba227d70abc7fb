"""Chains of reshape and transpose, written in their shortest form.

A chain is followed through *factors*: the pieces into which its dims are split and from which they
are put together, each with a size; dims of size one belong to none. Whatever the chain does, its
result is one split, one permutation and one merge of the factors of its start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.frontends.jax.draft import Builder, Node, Operand, Shape

VIEWS = ("reshape", "transpose")


@dataclass(eq=False, slots=True)
class Factor:
    """A piece of a dim. Once split, ``parts`` are its major and its minor piece."""

    size: int
    parts: tuple[Factor, Factor] | None = None

    def leaves(self) -> list[Factor]:
        if self.parts is None:
            return [self]
        return [leaf for part in self.parts for leaf in part.leaves()]


Dims = list[list[Factor]]


def factored(shape: Shape) -> Dims:
    return [[Factor(n)] if n != 1 else [] for n in shape]


def reshaped(dims: Dims, shape: Shape) -> Dims | None:
    """The same factors grouped into dims of ``shape``; None where a size cuts across a factor."""
    left = [leaf for dim in dims for factor in dim for leaf in factor.leaves()]
    result: Dims = []
    for size in shape:
        group: list[Factor] = []
        while size > 1:
            if not left:
                return None
            head = left[0]
            if size % head.size == 0:
                group.append(left.pop(0))
                size //= head.size
            elif head.size % size == 0:
                head.parts = (Factor(size), Factor(head.size // size))
                group.append(head.parts[0])
                left[0] = head.parts[1]
                size = 1
            else:
                return None
        result.append(group)
    return result


def followed(dims: Dims, node: Node) -> Dims | None:
    """``dims`` after the view ``node``."""
    if node.kind == "transpose":
        return [dims[d] for d in node.attrs["dims"]]
    return reshaped(dims, node.out.shape)


def same_as_reduced(view: Node, reduction: Node, chain: Sequence[Node]) -> bool:
    """Whether ``chain``, of views behind ``reduction`` of the operand of ``view``, puts at each dim
    what ``view`` has there, or a one for what is reduced."""
    start, reduced = factored(view.inputs[0].shape), reduction.attrs["dims"]
    viewed = followed(start, view)
    rest: Dims | None = [[] if d in reduced else dim for d, dim in enumerate(start)]
    if not reduction.attrs["keepdim"]:
        rest = [dim for d, dim in enumerate(start) if d not in reduced]
    for node in chain:
        rest = None if rest is None else followed(rest, node)
    if viewed is None or rest is None or len(viewed) != len(rest):
        return False
    gone = {leaf for d in reduced for leaf in _leaves(start[d])}
    return all(
        _leaves(left) == (_leaves(whole) if not gone.issuperset(_leaves(whole)) else [])
        for whole, left in zip(viewed, rest, strict=True)
    )


def unspread(x: Operand, builder: Builder) -> Operand:
    """``x`` of the same rank, with one in the place of dims along which it was only spread."""
    chain: list[Node] = []
    y = x
    while (node := builder.made_by(y, *VIEWS)) is not None:
        chain.insert(0, node)
        y = node.inputs[0]
    spread = builder.made_by(y, "expand")
    if spread is None:
        return x
    inner = spread.inputs[0]
    shape = (1,) * (len(y.shape) - len(inner.shape)) + inner.shape
    start = factored(y.shape)
    end: Dims | None = start
    for node in chain:
        end = None if end is None else followed(end, node)
    if end is None:
        return x
    gone = {leaf for d, n in enumerate(shape) if n == 1 for leaf in _leaves(start[d])}
    target = list(x.shape)
    for d, dim in enumerate(end):
        if dim and gone.issuperset(_leaves(dim)):
            target[d], end[d] = 1, []
        elif gone.intersection(_leaves(dim)):
            return x
    thin = builder.reshape(inner, shape)
    kept = [[] if n == 1 else dim for n, dim in zip(shape, start, strict=True)]
    for kind, argument in between(kept, shape, end, tuple(target)):
        thin = getattr(builder, kind)(thin, argument)
    return unspread(thin, builder)


def shortened(node: Node, builder: Builder) -> Sequence[Operand] | None:
    """The view ``node`` with all views that it reads from, if that takes fewer ops."""
    chain = [node]
    while (before := builder.made_by(chain[0].inputs[0], *VIEWS)) is not None:
        chain.insert(0, before)
    for start in range(len(chain) - 1):
        steps = _steps(chain[start:])
        if steps is not None and len(steps) < len(chain) - start:
            x = chain[start].inputs[0]
            for kind, argument in steps:
                x = getattr(builder, kind)(x, argument)
            return [x]
    return None


def _steps(chain: Sequence[Node]) -> list[tuple[str, Shape]] | None:
    """The shortest views that do what the chain does."""
    shape = chain[0].inputs[0].shape
    start = factored(shape)
    dims = start
    for node in chain:
        after = followed(dims, node)
        if after is None:
            return None
        dims = after
    return between(start, shape, dims, chain[-1].out.shape)


def between(start: Dims, shape: Shape, end: Dims, target: Shape) -> list[tuple[str, Shape]]:
    """The views from ``start`` (of ``shape``) to ``end`` (of ``target``) over the same factors."""
    order = [leaf for dim in end for factor in dim for leaf in factor.leaves()]
    origin = [leaf for dim in start for factor in dim for leaf in factor.leaves()]
    if order == origin:
        return [] if shape == target else [("reshape", target)]
    if len(shape) == len(target):  # a plain permutation, dims of size one included
        dims = _permutation(start, end)
        if dims is not None:
            return [("transpose", dims)]
    groups = _runs(start, end)
    middle = tuple(math.prod(f.size for f in group) for group in groups)
    rank = {id(group[0]): i for i, group in enumerate(groups)}
    dims = tuple(rank[id(leaf)] for leaf in order if id(leaf) in rank)
    steps: list[tuple[str, Shape]] = [] if shape == middle else [("reshape", middle)]
    steps.append(("transpose", dims))
    if tuple(middle[d] for d in dims) != target:
        steps.append(("reshape", target))
    return steps


def _leaves(dim: list[Factor]) -> list[int]:
    return [id(leaf) for factor in dim for leaf in factor.leaves()]


def _permutation(start: Dims, end: Dims) -> tuple[int, ...] | None:
    free = list(range(len(start)))
    permutation = []
    for dim in end:
        here = next((i for i in free if _leaves(start[i]) == _leaves(dim)), None)
        if here is None:
            return None
        free.remove(here)
        permutation.append(here)
    return tuple(permutation)


def _runs(start: Dims, end: Dims) -> list[list[Factor]]:
    """Leaves in the order of ``start``, grouped where both ends keep them side by side in a dim."""
    follows = {}
    for dim in end:
        leaves = [leaf for factor in dim for leaf in factor.leaves()]
        follows.update({id(a): id(b) for a, b in itertools.pairwise(leaves)})
    groups: list[list[Factor]] = []
    for dim in start:
        previous: Factor | None = None
        for leaf in (leaf for factor in dim for leaf in factor.leaves()):
            if previous is not None and follows.get(id(previous)) == id(leaf):
                groups[-1].append(leaf)
            else:
                groups.append([leaf])
            previous = leaf
    return groups
