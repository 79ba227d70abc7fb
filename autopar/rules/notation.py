"""The one-line notation of rules.

A rule names the loop indices (*factors*) of an op and says which dims of its operands and results
they make up::

    "b s k+, n k+ -> b s n"        a linear layer: k is summed over
    "b s (h d) -> b s h d"         a reshape: one dim made of two factors, h the major one
    "... c!, c!, c! -> ... c!"     a layer norm: c is kept whole
    "b g s d -> b g r s d"         an expansion: r appears in the result only

==========  =====================================================================================
``f``       parallel: any axis may split it, operands without it are whole on every rank
``f+``      summed over: splitting it leaves the results as partial sums
``f!``      kept whole: no axis may split it
``f~``      may be split unevenly (``torch.chunk`` sizes); marks combine, ``k+~``
``f=4``     the extent, where no dim shows it: ``"(h=4 d) -> h d"``; marks follow, ``h=4!``
``(f g)``   a dim made of factors, the major one first; it is split by splitting the first
``1``       a dim of size one that belongs to no factor
``...``     the dims that the explicit ones leave, aligned at the right; size 1 broadcasts; marks
            hold for all of them
==========  =====================================================================================

Names are any letters, and case tells them apart: ``b`` and ``B`` are two factors. Factors called
``D`` and ``P`` are shown as ``D_`` and ``P_``, since a strategy says with these letters that an
axis passes partial sums on. A mark may stand at any occurrence of its factor and holds for all of
them. A term may be empty:
``"t v!, t+ -> "`` has a scalar result. What a summed factor sums must be all that the result is: a
bias belongs in an op of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from autopar.nouns.errors import UserError
from autopar.nouns.graph import Op, Tensor
from autopar.rules.implementations.table import TABLE, Implementation
from autopar.rules.kept import Chunked, Kept, Routed, Streamed, TupleRecord

FactorKind = Literal["parallel", "summed", "whole"]
Cost = Literal["matmul", "attention", "conv", "elementwise", "reduction", "gather"]
Dim = tuple[str, ...]
Term = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """A loop index of an op with its extent."""

    name: str
    size: int
    kind: FactorKind
    uneven: bool = False


@dataclass(frozen=True, slots=True)
class Internal(TupleRecord):
    """A collective inside an implementation of an op.

    The tensor it moves has the extents of ``dims`` (local, after the other axes' splits) times
    ``count``, in ``dtype``. A shift is made as often as there are other ranks, or as there are such
    that have what a rank wants where that begins ``back`` before its own piece; all else once.
    ``ahead``: it goes from axis to axis, the innermost first, and is of what lies behind each: it
    has those extents for every rank along the axes that are still to come. ``needed_by``: the
    operand for whose gradient one of backward is made; None: for that of any.
    """

    kind: str
    direction: Literal["forward", "backward"]
    dims: tuple[str, ...]
    count: int
    dtype: str
    ahead: bool = False
    back: int | None = None
    needed_by: int | None = None


@dataclass(frozen=True, slots=True)
class Implemented(TupleRecord):
    """How an op runs where an axis splits ``factor``, which its plain call cannot be split by.

    name:  of a row of `autopar.rules.implementations.table`.
    moves: its collectives. A factor with some may be absent from the results, which are then whole.
    also:  factors that the axis splits together with the first one: queries' rows and keys of a
           ring, tokens and experts of a dispatch. Such a way is chosen by its name, and so is one
           whose pieces lie in zigzag.
    of:    the operands whose dims of ``also`` are split, by position; none: all.
    reach: how much of the sequence a row of a causal mask sees at most.
    sums:  results are shares of a sum, though the plain call keeps the factors whole.
    """

    factor: str
    name: str
    moves: tuple[Internal, ...] = ()
    also: tuple[str, ...] = ()
    of: tuple[int, ...] = ()
    reach: float = 1.0
    sums: bool = False

    def __post_init__(self) -> None:
        TupleRecord.__post_init__(self)
        if self.name not in TABLE:
            raise RuleError(
                f"an axis that splits {self.factor} makes the op run by {self.name!r}, which is "
                f"no implementation: there are {', '.join(TABLE)}"
            )

    @property
    def row(self) -> Implementation:
        return TABLE[self.name]

    @property
    def choice(self) -> str:
        """What a strategy says of an axis that runs the op so."""
        return self.name if self.also or self.row.lie == "zigzag" else self.factor

    def work(self, ways: int) -> float:
        """Of the rank that has most to do, times an equal share."""
        return self.row.work(ways, self.reach)

    @property
    def factors(self) -> tuple[str, ...]:
        """All that the axis splits."""
        return (self.factor, *self.also)


@dataclass(frozen=True, slots=True)
class Rule(TupleRecord):
    """``text`` in the notation above, and what no index can say.

    linear:     the op is jointly linear in the operands ``partials`` (None: in all of them) for
                fixed values of the others, so a partial sum may pass through it.
    alone:      operands in each of which alone it is linear where all others are whole, so that a
                partial sum may pass at any one of them: the factors of a product.
    saves:      operands that the backward pass needs, by position; ``saves_results`` likewise.
    keeps:      what else the forward pass keeps for backward.
    workspace:  what it holds besides while it runs; ``workspace_back``: while its backward does.
    streams:    what it moves besides, one after the other with its products; ``streams_back``:
                in its backward.
    chunked:    what it runs in chunks of, with the collectives that move that; None: at once.
    routed:     what is done for rows that are routed unevenly; None: all indices have as many.
    implementations: what takes the plain op's place where an axis splits a factor, if anything.
    flops:      forward floating-point operations per point of the iteration space (all factors).
    flop_terms: (coefficient, factors) pairs whose sum replaces that, where not every product runs
                over all factors.
    again:      such pairs of its forward that its backward does once more; ``backward`` then says
                what else it does, of products too.
    products:   of matmul and conv rules the operands whose gradients take a product each, or all.
    sides:      m, n and k of a matmul rule's product where its operands do not show them, each as
                factors over factors: tokens times routes over experts.
    backward:   backward work as a multiple of the forward's; matmul and conv rules count one such
                product for each operand that has a gradient.
    cost:       which efficiency curve the op follows in the cost model.
    view:       the op moves no bytes at run time.
    defers:     backward is linear in the gradient, so that of a partial sum it is a partial sum;
                False for hand-written derivatives that clip or round what comes in.
    ungraded:   results, by position, to which no gradient comes back and that are the same on all
                ranks: they need not have every factor.
    scaled:     what ranks join of scales inside the op hangs on which axis splits which factor.
    """

    text: str
    linear: bool = False
    partials: tuple[int, ...] | None = None
    alone: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()
    saves_results: tuple[int, ...] = ()
    keeps: tuple[Kept, ...] = ()
    workspace: tuple[Kept, ...] = ()
    workspace_back: tuple[Kept, ...] = ()
    streams: tuple[Streamed, ...] = ()
    streams_back: tuple[Streamed, ...] = ()
    chunked: Chunked | None = None
    routed: Routed | None = None
    implementations: tuple[Implemented, ...] = ()
    flops: float = 1.0
    flop_terms: tuple[tuple[float, tuple[str, ...]], ...] = ()
    again: tuple[tuple[float, tuple[str, ...]], ...] = ()
    products: tuple[int, ...] | None = None
    sides: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    backward: float = 1.0
    cost: Cost = "elementwise"
    view: bool = False
    defers: bool = True
    ungraded: tuple[int, ...] = ()
    scaled: bool = False

    def implemented(self, choice: str) -> Implemented | None:
        """What takes the plain op's place where a strategy says ``choice`` of an axis."""
        return next((each for each in self.implementations if each.choice == choice), None)

    def moves_inside(self, choice: str) -> bool:
        """Whether an axis of this choice makes ranks talk inside the op."""
        implemented = self.implemented(choice)
        return implemented is not None and bool(implemented.moves)

    def carries_partial(self, position: int) -> bool:
        """Whether a partial sum may enter at operand ``position`` and leave by the results."""
        return self.linear and (self.partials is None or position in self.partials)

    def takes_partial(self, choice: str, position: int) -> bool:
        """Whether an axis of this choice has the operand at ``position`` as a partial sum."""
        if choice == "P":
            return self.carries_partial(position)
        return position in self.alone and choice == PASS_ALONE[position]


RuleMaker = Callable[[Op, tuple[Tensor, ...], tuple[Tensor, ...]], Rule]
"""The rule of an op with its operand and result tensors, where it depends on shapes or attrs."""


@dataclass(frozen=True, slots=True)
class BoundRule:
    """A rule with the extents of one op: every dim is a tuple of factor names, major first.

    ``str`` gives a text that binds to the same factors again, given the same shapes.
    """

    rule: Rule
    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    factors: Mapping[str, Factor] = field(default_factory=dict)

    def __str__(self) -> str:
        left = ", ".join(" ".join(map(self._dim, t)) for t in self.operands)
        return f"{left} -> {', '.join(' '.join(map(self._dim, t)) for t in self.results)}".strip()

    def _dim(self, dim: Dim) -> str:
        if len(dim) == 1:
            return self._mark(dim[0])
        return f"({' '.join(map(self._mark, dim))})" if dim else "1"

    def _mark(self, name: str) -> str:
        factor = self.factors[name]
        kind = {"parallel": "", "summed": "+", "whole": "!"}[factor.kind]
        shown = any(dim == (name,) for term in (*self.operands, *self.results) for dim in term)
        size = "" if shown else f"={factor.size}"
        return name + size + kind + ("~" if factor.uneven else "")

    @property
    def points(self) -> int:
        """Size of the whole iteration space."""
        return math.prod(f.size for f in self.factors.values())

    def splits(self, choice: str) -> tuple[str, ...]:
        """The factors that an axis of this choice splits; none where it splits nothing."""
        if choice in self.factors:
            return (choice,)
        implemented = self.rule.implemented(choice)
        return () if implemented is None else implemented.factors

    def holder(self, result: int, choice: str) -> int | None:
        """The dim of a result that ``choice`` splits; None where it splits none."""
        return self._holder(self.results[result], choice)

    def operand_holder(self, operand: int, choice: str) -> int | None:
        """The dim of an operand that ``choice`` splits; None where it splits none."""
        implemented = None if choice in self.factors else self.rule.implemented(choice)
        if implemented is not None and implemented.of and operand not in implemented.of:
            return self._holder(self.operands[operand], implemented.factor)
        return self._holder(self.operands[operand], choice)

    def leaves_partial(self, choice: str) -> bool:
        """Whether ``choice`` leaves the gradient of some operand a partial sum."""
        every = range(len(self.operands))
        return any(self.operand_holder(operand, choice) is None for operand in every)

    def _holder(self, term: Term, choice: str) -> int | None:
        for factor in self.splits(choice):
            for place, dim in enumerate(term):
                if factor in dim:
                    return place
        return None


class RuleError(UserError, ValueError):
    """A rule that does not parse or does not fit the shapes of an op."""


PASS_ALONE = ("P0", "P1")
"""By position, that a partial sum passes through an op at this operand alone."""
CHOICES = ("D", "P", *PASS_ALONE)
"""What an axis does to an op beside splitting a factor, see `autopar.rules.strategies`."""
