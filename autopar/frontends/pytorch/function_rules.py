"""The rule of a `torch.autograd.Function` that does not work element by element.

Its forward and backward are traced, and `autopar.rules.composite` follows every dim through their
ops. That is of one size, and a function may read sizes, from its tensors, its arguments or its
author's head. What a program calls on pieces must be the same function, so

- each index that may be split is tried in the sizes that its pieces can have, every divisor, and
  one beyond: the same ops with the same constants, every dim as long as the index says. An index
  that fails is whole. Then all that are left are tried together;
- the function is run on drawn numbers, whole and in pieces (`autopar.rules.trial`). Numbers can
  refute a rule only: a rule that they refute, or that cannot be run here, is none.

A function whose backward differs with what asks for a gradient, an operand that has none in the
model, is taken as it is where all floats ask for one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from autopar.frontends.pytorch.execute import execute
from autopar.frontends.pytorch.function_dims import Followed, followed, with_products
from autopar.frontends.pytorch.function_graphs import Pulled, Untraceable, graphs_of
from autopar.frontends.pytorch.functions import Again, Called
from autopar.nouns.graph import Graph, Op
from autopar.nouns.text.graph import to_text
from autopar.rules.binding import bind_rule
from autopar.rules.composite import linear_in
from autopar.rules.notation import Rule, RuleError
from autopar.rules.own_functions import FUNCTION
from autopar.rules.registry import UnruledOp
from autopar.rules.trial import try_rule
from autopar.torch_private.modes import without_modes, without_torch_function

SMALL = 4
"""About the extent of a split index when numbers are drawn."""

SHAPED = frozenset(("reshape", "full", "expand", "scatter_sum"))
"""Kinds that follow from their attrs alone, one of which is the shape of the result."""

Sizes = Mapping[str, int]
"""By index another extent than the function was traced in."""


@dataclass(frozen=True, slots=True)
class Ruled:
    """``text`` is empty where no axis may split anything, or nothing is known.

    linear: the ops of the backward show that it is linear in the gradients that come in.
    """

    text: str = ""
    linear: bool = False


def with_rules(functions: Sequence[Called], fake: Any) -> list[Called]:
    """``functions``, those without a rule by what tracing them shows. ``fake``: the mode of the
    tensors that they were called with."""
    known: dict[Hashable, Ruled] = {}
    return [_with_rule(called, fake, known) for called in functions]


def _with_rule(called: Called, fake: Any, known: MutableMapping[Hashable, Ruled]) -> Called:
    if called.again is None:
        return called
    ruled = rule_of(called, called.again, fake, known)
    return replace(called, rule=ruled.text, linear=called.linear or ruled.linear)


def rule_of(
    called: Called, again: Again, fake: Any, known: MutableMapping[Hashable, Ruled]
) -> Ruled:
    """The rule of one call. ``known``: those of this capture, so that equal calls in equal sizes
    are tried once."""
    shapes = [tuple(a.shape) for a in again.args if isinstance(a, Tensor)]
    try:
        pulled = graphs_of(again.apply, again.args, shapes, fake)
    except Untraceable:
        return Ruled()
    texts = to_text(pulled.forward), to_text(pulled.backward)
    key = (called.path, repr(called.args), texts, pulled.gradients, pulled.graded)
    if key not in known:
        try:
            known[key] = _Search(called, again, fake, pulled).ruled()
        except (UnruledOp, RuleError):
            known[key] = Ruled()
    return known[key]


class _Search:
    """One function in the sizes of one call."""

    def __init__(self, called: Called, again: Again, fake: Any, pulled: Pulled) -> None:
        self.called, self.again, self.fake = called, again, fake
        self.pulled = pulled
        self.products = with_products(pulled)
        self.dims: Followed = followed(self.products)
        self.extents = dict(self._extents())

    def ruled(self) -> Ruled:
        free = [i for i in self.extents if self._holds_alone(i)]
        if not free or not self._holds_together(free):
            return Ruled()
        text = self._text(frozenset(free))
        forward = self.pulled.forward
        bind_rule(Rule(text), _shapes(forward, forward.inputs), _shapes(forward, forward.outputs))
        back = self.products.backward
        linear = linear_in(back, back.inputs[len(forward.inputs) :])
        return Ruled(text, linear) if self._holds_on_numbers(text, free) else Ruled()

    # -- indices -----------------------------------------------------------------------------------

    def _extents(self) -> Iterator[tuple[str, int]]:
        """Of every index that might be split: operands have it, everywhere in one extent."""
        extents: dict[str, set[int]] = {}
        forward = self.pulled.forward
        for name in forward.inputs:
            for dim, size in enumerate(forward.tensors[name].shape):
                index = self.dims.index("forward", name, dim)
                extents.setdefault(index, set()).add(size // self._inner("forward", name, dim))
        for index, sizes in extents.items():
            if index not in self.dims.indices.whole and len(sizes) == 1 and max(sizes) > 1:
                yield index, max(sizes)

    def _inner(self, side: str, name: str, dim: int) -> int:
        return self.dims.inner.get((side, name, dim), 1)

    def _shape(self, side: str, name: str, graph: Graph, sizes: Sizes) -> tuple[int, ...]:
        """Of a tensor where indices have other ``sizes``."""
        return tuple(
            n // self.extents[i] * sizes[i] if (i := self.dims.index(side, name, d)) in sizes else n
            for d, n in enumerate(graph.tensors[name].shape)
        )

    def _text(self, free: frozenset[str]) -> str:
        """The rule in which no index but ``free`` may be split."""
        forward = self.pulled.forward

        def term(name: str) -> str:
            words = []
            for dim, size in enumerate(forward.tensors[name].shape):
                index, inner = (
                    self.dims.index("forward", name, dim),
                    self._inner("forward", name, dim),
                )
                word = index if index in free else f"{index}!"
                word = word if inner == 1 else f"({word} {index}_{inner}={inner}!)"
                words.append("1" if size == 1 else word)
            return " ".join(words)

        return " -> ".join(", ".join(map(term, s)) for s in (forward.inputs, forward.outputs))

    # -- other sizes -------------------------------------------------------------------------------

    def _holds_alone(self, index: str) -> bool:
        extent = self.extents[index]
        sizes = [n for n in range(1, extent // 2 + 1) if extent % n == 0]
        return all(self._holds({index: n}) for n in (*reversed(sizes), 2 * extent + 1))

    def _holds_together(self, free: Sequence[str]) -> bool:
        extents = {i: self.extents[i] for i in free}
        least = {i: 1 for i in free}
        halves = {
            i: n // next(w for w in range(2, n + 1) if n % w == 0) for i, n in extents.items()
        }
        return all(self._holds(sizes) for sizes in (halves, least))

    def _holds(self, sizes: Sizes) -> bool:
        """Whether the function does the same where indices have other sizes."""
        ours = self.pulled
        shapes = [self._shape("forward", n, ours.forward, sizes) for n in ours.forward.inputs]
        try:
            other = graphs_of(self.again.apply, self.again.args, shapes, self.fake)
        except Untraceable:
            return False
        return other.gradients == ours.gradients and all(
            self._is_same(side, mine, theirs, sizes)
            for side, mine, theirs in (
                ("forward", ours.forward, other.forward),
                ("backward", ours.backward, other.backward),
            )
        )

    def _is_same(self, side: str, mine: Graph, theirs: Graph, sizes: Sizes) -> bool:
        """Names follow from places, so graphs of the same ops have the same."""
        if (mine.inputs, mine.outputs) != (theirs.inputs, theirs.outputs):
            return False
        if list(mine.tensors) != list(theirs.tensors) or len(mine.ops) != len(theirs.ops):
            return False
        for name, tensor in mine.tensors.items():
            shape = self._shape(side, name, mine, sizes)
            if replace(tensor, shape=shape) != theirs.tensors[name]:
                return False
        return all(
            _call_of(a, mine) == _call_of(b, theirs)
            for a, b in zip(mine.ops, theirs.ops, strict=True)
        )

    # -- numbers -----------------------------------------------------------------------------------

    def _holds_on_numbers(self, text: str, free: Sequence[str]) -> bool:
        """Whether the rule holds for the function on drawn numbers, its indices small."""
        forward = self.pulled.forward
        sizes = {i: _small(self.extents[i]) for i in free}
        flowing = dict(zip(forward.outputs, self.pulled.graded, strict=True))
        tensors = {
            n: replace(
                forward.tensors[n],
                shape=self._shape("forward", n, forward, sizes),
                differentiable=flowing.get(n, "float" in forward.tensors[n].dtype),
            )
            for n in (*forward.inputs, *forward.outputs)
        }
        function = {"path": self.called.path, "args": self.called.args}
        op = Op(self.called.kind, forward.inputs, forward.outputs, {FUNCTION: function})
        shapes = [[tensors[n].shape for n in side] for side in (forward.inputs, forward.outputs)]
        bound = bind_rule(Rule(text), *shapes)
        with without_modes(), without_torch_function():
            return try_rule(op, tensors, bound, execute).holds is True


def _small(extent: int) -> int:
    """The smallest divisor of ``extent`` from `SMALL` on."""
    return next(n for n in range(min(SMALL, extent), extent + 1) if extent % n == 0)


def _shapes(graph: Graph, names: Sequence[str]) -> list[tuple[int, ...]]:
    return [graph.tensors[n].shape for n in names]


def _call_of(op: Op, graph: Graph) -> object:
    """What of an op is the same in all sizes: a ``shape`` is that of its result."""
    attrs = dict(op.attrs)
    if op.kind in SHAPED:
        attrs.pop("torch", None)
        attrs["shape"] = tuple(attrs["shape"]) == graph.tensors[op.name].shape
    return op.kind, op.inputs, op.outputs, attrs
