"""The legal strategies of an op on a mesh, derived from its rule.

A *choice* says what one axis does to one op:

==========  ===============================================================================
``""``      nothing: every rank of the axis computes the whole op
``"f"``     the axis splits factor ``f``
``"ring"``  the op runs by an implementation that splits several factors at once, by its name
``"D"``     nothing in the forward pass; the gradients of results and operands stay partial
            sums (a derivative is linear in the gradient; a hand-written one may not be, and
            then there is no such choice)
``"P"``     a partial sum passes through (ops that are linear in some operands)
``"P0"``    one passes at the first operand alone (products, of which all other factors are
            whole); ``"P1"`` at the second. For axes that split the batch
==========  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.nouns.axes import REPLICATE, SHARD, TABLE, Role, role_of
from autopar.nouns.graph import Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import DEFERRED, PARTIAL, WHOLE, Placement, Sharding, split
from autopar.rules.notation import PASS_ALONE, BoundRule, Rule, Term

NOTHING = ""
DEFER = "D"
PASS_PARTIAL = "P"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One choice per axis, as ``((axis, choice), ...)`` in mesh order; "nothing" is left out."""

    choices: tuple[tuple[str, str], ...] = ()

    def on(self, axis: str) -> str:
        for name, choice in self.choices:
            if name == axis:
                return choice
        return NOTHING

    def implementations(self, rule: Rule) -> dict[str, tuple[str, ...]]:
        """By name, the implementations that the op runs by: the axes that split their factors."""
        chosen: dict[str, tuple[str, ...]] = {}
        for axis, choice in self.choices:
            implemented = rule.implemented(choice)
            if implemented is not None:
                chosen[implemented.name] = (*chosen.get(implemented.name, ()), axis)
        return chosen

    def __str__(self) -> str:
        return " ".join(f"{a}:{c}" for a, c in self.choices) or "whole"

    @staticmethod
    def parse(text: str) -> Strategy:
        if text == "whole":
            return Strategy()
        pairs = (part.split(":") for part in text.split())
        return Strategy(tuple((a, c) for a, c in pairs))


def restricted(rule: Rule) -> frozenset[str]:
    """Factors that no axis splits for which a plan may choose."""
    return frozenset(
        e.factor for e in rule.implementations if Role.OPS not in e.row.roles and not e.also
    )


def alternatives(bound: BoundRule, axis: str, usual: str, samples: str) -> tuple[str, ...]:
    """What an axis may do to an op in place of what follows from how the batch flows, ``usual``.

    Implementations that split more than the same factor may take its place. Where sequences are
    split by an implementation so may any factor but the one of ``samples``: heads in the place of
    rows; and where samples are, what is split beside them: experts in the place of tokens. On axes
    of data parallelism there is nothing to choose.
    """
    rule, role = bound.rule, TABLE[axis].role
    known, (factor, *_) = rule.implemented(usual), bound.splits(usual) or ("",)
    alike = [e for e in rule.implementations if e.also and e.factor == factor]
    if axis in (REPLICATE, SHARD) or (not alike and not known):
        return ()
    lie = known.row.lie if known else "anyhow"
    beside = [e.choice for e in alike if role in e.row.roles and e.row.lie in (lie, "anyhow")]
    if role is Role.SEQUENCES and factor in restricted(rule):
        others = [f for f, of in bound.factors.items() if of.kind == "parallel" and of.size > 1]
        return (*beside, *(f for f in others if f not in (factor, samples)))
    return (*beside, *dict.fromkeys(f for e in alike for f in e.also if rule.implemented(f)))


def choices(
    bound: BoundRule,
    axis_size: int,
    differentiable: bool,
    taken: Mapping[str, int] | None = None,
    apart: bool = False,
) -> list[str]:
    """Everything that an axis of ``axis_size`` may do to the op, "nothing" first.

    ``taken`` gives, by factor, how many ways the outer axes have split it already. ``apart``:
    pieces need not lie one behind the other, see `autopar.rules.pieces`.
    """
    taken = taken or {}
    split = [f for f in bound.factors if _may_split(bound, f, axis_size, taken, apart)]
    together = [
        each.choice
        for each in bound.rule.implementations
        if each.choice != each.factor
        and all(_divides(bound, f, axis_size, taken) for f in each.factors)
        and not (each.row.alone and any(taken.get(f, 1) > 1 for f in each.factors))
    ]
    allowed = [NOTHING, *split, *together]
    if differentiable and bound.rule.defers:
        allowed.append(DEFER)
        if bound.rule.linear:
            allowed.append(PASS_PARTIAL)
    return allowed


def _divides(bound: BoundRule, name: str, ways: int, taken: Mapping[str, int]) -> bool:
    return bound.factors[name].size % (taken.get(name, 1) * ways) == 0


def _may_split(
    bound: BoundRule, name: str, ways: int, taken: Mapping[str, int], apart: bool
) -> bool:
    factor = bound.factors[name]
    before = taken.get(name, 1)
    if factor.kind == "whole" or factor.size % before:
        return False
    if not bound.rule.defers and (factor.kind == "summed" or bound.leaves_partial(name)):
        return False
    even = factor.size // before % ways == 0
    if apart:
        return even
    # Every rank gets at least one index: torch.chunk may leave the last ranks with none.
    if not even and not (
        factor.uneven and before == 1 and -(-factor.size // ways) * (ways - 1) < factor.size
    ):
        return False
    return all(_contiguous(t, name, bound, taken, even) for t in (*bound.operands, *bound.results))


def _contiguous(
    term: Term, name: str, bound: BoundRule, taken: Mapping[str, int], even: bool
) -> bool:
    """Splitting ``name`` must leave each rank a contiguous piece of the dim that holds it.

    The factors before it in its dim must be split down to single indices. An uneven split also
    needs the dim for itself: pieces of ``(v d)`` are chunks of the dim only where v divides.
    """
    holders = [dim for dim in term if name in dim]
    if not holders:
        return True
    dim = holders[0]
    major = dim[: dim.index(name)]
    alone = all(f == name or bound.factors[f].size == 1 for f in dim)
    return (
        len(holders) == 1
        and dim.count(name) == 1
        and all(bound.factors[f].size == taken.get(f, 1) for f in major)
        and (even or alone)
    )


def strategies(
    bound: BoundRule,
    mesh: Mesh,
    differentiable: bool,
    pinned: Mapping[str, Sequence[str]] | None = None,
) -> list[Strategy]:
    """Every legal strategy on ``mesh``; ``pinned`` leaves some axes these choices alone, of which
    the first follows from how the batch flows.

    Empty where no pinned choice is legal for the op.
    """
    pinned = pinned or {}
    partial: list[tuple[tuple[tuple[str, str], ...], dict[str, int]]] = [((), {})]
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        if size == 1:
            continue
        grown = []
        for chosen, taken in partial:
            for choice in _open_to(bound, axis, size, differentiable, taken, pinned.get(axis)):
                now = dict(taken)
                for factor in bound.splits(choice):
                    now[factor] = now.get(factor, 1) * size
                grown.append(((*chosen, (axis, choice)), now))
        partial = grown
    return [Strategy(tuple((a, c) for a, c in chosen if c)) for chosen, _ in partial]


def _open_to(
    bound: BoundRule,
    axis: str,
    ways: int,
    differentiable: bool,
    taken: Mapping[str, int],
    pinned: Sequence[str] | None,
) -> list[str]:
    """The choices of one axis; pinned ones in their order."""
    role = role_of(axis)
    legal = choices(bound, ways, differentiable, taken)
    if pinned is None:
        named = {e.choice: e.row.roles for e in bound.rule.implementations if e.choice != e.factor}
        return [c for c in legal if role in named.get(c, (role,))]
    if differentiable and bound.rule.defers:  # which nothing but the batch's flow asks for
        legal += [PASS_ALONE[i] for i in bound.rule.alone]
    if role is Role.SEQUENCES:  # what the batch's flow says stands for pieces here and there, too
        usual = [*legal, *choices(bound, ways, differentiable, taken, apart=True)]
        return [c for i, c in enumerate(pinned) if c in (legal if i else usual)]
    return [c for c in pinned if c in legal]


def shardings(
    bound: BoundRule,
    strategy: Strategy,
    mesh: Mesh,
    operand_differentiable: Sequence[bool],
    result_differentiable: Sequence[bool],
) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]]:
    """What the strategy asks of each operand and gives for each result.

    The flags say where gradients flow *through this op*, see `flows`.
    """
    chosen = [(a, c) for a, c in strategy.choices if a in mesh.axes]  # all else is whole
    operands = tuple(
        Sharding.of([(a, operand_placement(bound, i, c, grad)) for a, c in chosen])
        for i, grad in zip(range(len(bound.operands)), operand_differentiable, strict=True)
    )
    results = tuple(
        Sharding.of([(a, result_placement(bound, term, c, grad)) for a, c in chosen])
        for term, grad in zip(bound.results, result_differentiable, strict=True)
    )
    return operands, results


def flows(op: Op, tensors: Mapping[str, Tensor]) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Through which operands and results of ``op`` the loss's gradient flows.

    An operand that has a gradient elsewhere has none here where no result has one (``detach``,
    comparisons): the edge to it then moves nothing in backward.
    """
    results = tuple([tensors[n].differentiable for n in op.outputs])
    flowing = any(results)
    return tuple([flowing and tensors[n].differentiable for n in op.inputs]), results


def operand_placement(
    bound: BoundRule, position: int, choice: str, differentiable: bool
) -> Placement:
    """What ``choice`` of one axis asks of the operand at ``position``."""
    if choice == NOTHING:
        return WHOLE
    if bound.rule.takes_partial(choice, position):
        return PARTIAL
    held = bound.operand_holder(position, choice)
    if held is not None:
        return split(held)
    return DEFERRED if differentiable else WHOLE


def result_placement(bound: BoundRule, term: Term, choice: str, differentiable: bool) -> Placement:
    """What ``choice`` of one axis gives for the result of ``term``."""
    if choice == NOTHING:
        return WHOLE
    if choice in (PASS_PARTIAL, *PASS_ALONE):
        return PARTIAL
    if choice == DEFER:
        return DEFERRED if differentiable else WHOLE
    factors = bound.splits(choice)
    for i, dim in enumerate(term):
        if any(f in dim for f in factors):
            return split(i)
    # A factor that a special implementation resolves inside leaves the result whole.
    implemented = bound.rule.implemented(choice)
    sums = implemented is not None and implemented.sums
    summed = sums or any(bound.factors[f].kind == "summed" for f in factors)
    return PARTIAL if summed else WHOLE
