"""A graph, or the body of a block, while the batch is followed through it, see `rules.batch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.nouns.graph import Graph, Op
from autopar.nouns.kinds import DRAWS
from autopar.nouns.sharding import PARTIAL, WHOLE, Placement, split
from autopar.rules.notation import PASS_ALONE, BoundRule, Rule
from autopar.rules.pieces import (
    cut_factor,
    leads,
    needs_more,
    needs_order,
    places_before,
    stands_once,
)
from autopar.rules.registry import bind
from autopar.rules.strategies import DEFER, NOTHING, PASS_PARTIAL

State = Placement | None
"""A placement on the data axes; None is free."""
_SPLIT_MOST = "PRS"


@dataclass(slots=True)
class Scope:
    """The top level, or the body of one block; ``batched``: some input holds a batch.
    ``length``: of the sequences that are followed, 0 where samples are; ``ways``: their pieces."""

    name: str | None
    graph: Graph
    batched: bool
    length: int = 0
    ways: int = 0
    entering: dict[str, State] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    bound: dict[str, BoundRule] = field(default_factory=dict)
    obstacles: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    apart: dict[str, int] = field(default_factory=dict)
    """Of tensors that are whole on every rank the dim along which readers may take samples."""
    behind: dict[str, int] = field(default_factory=dict)
    """Of tensors whose pieces do not lie one behind the other, see `autopar.rules.pieces`."""
    drawn: set[str] = field(default_factory=set)
    """Tensors made of random numbers, which each rank and microbatch draws for itself."""
    alike: set[str] = field(default_factory=set)
    """Tensors of one number everywhere, of which one piece is as good as another."""
    gathered: set[str] = field(default_factory=set)
    """Inputs of the graph of which an op needs more than a piece."""
    followed: dict[str, State] | None = None
    """What entered when the ops were last followed."""

    def forward(self, scopes: Mapping[str, Scope]) -> None:
        """States and choices of all ops, from the inputs down."""
        self.obstacles.clear()
        self.states.update(self.entering)
        for op in self.graph.ops:
            if op.kind == "block":
                self._call(op, scopes)
            else:
                self._op(op)

    def _call(self, op: Op, scopes: Mapping[str, Scope]) -> None:
        body = scopes[op.attrs["block"]]
        for inner, outer in zip(body.graph.inputs, op.inputs, strict=True):
            if outer in self.drawn:
                body.drawn.add(inner)
            known, now = body.entering.get(inner), self.states.get(outer)
            body.entering[inner] = self._joined(known, now, op, inner)
            if body.behind.setdefault(inner, self.behind.get(outer, 1)) != self.behind.get(
                outer, 1
            ):
                raise needs_more(op, outer)
        if body.followed != body.entering:
            body.forward(scopes)
            body.followed = dict(body.entering)
        for inner, outer in zip(body.graph.outputs, op.outputs, strict=True):
            if inner in body.drawn:
                self.drawn.add(outer)
            self.states[outer] = body.states.get(inner)
            self.behind[outer] = body.behind.get(inner, 1)

    def _joined(self, known: State, now: State, op: Op, name: str) -> State:
        """What a block input is, given two calls: free gives way to anything else, a sum to what is
        whole, and that to what is split, since callers can make one of the other."""
        if known is None or now is None or known == now:
            return now if known is None else known
        if PARTIAL in (known, now):
            self._against(op, f"is given {name} as a sum over the batch in one call of several")
        return max((known, now), key=lambda state: _SPLIT_MOST.index(state.kind))

    def _op(self, op: Op) -> None:
        bound = self.bound_rule(op)
        if op.kind == "full":
            self.alike.update(op.outputs)
        if op.kind in DRAWS or not self.drawn.isdisjoint(op.inputs):
            self.drawn.update(op.outputs)
        states = [self.states.get(name) for name in op.inputs]
        factor, mixed = self._factor(op, bound, states)
        sums = [i for i, s in enumerate(states) if s == PARTIAL]
        if self._wants_whole_gradients(op, bound, factor):
            self._against(
                op,
                "has a backward that is not linear in the gradient (it clips or "
                "rounds it, say), so that of the whole batch must be there",
            )
            self._whole(op, bound)
        elif factor is not None:
            if sums:
                self._needs_whole(op, op.inputs[sums[0]])
            self._splits(op, bound, factor)
        elif mixed:
            self._whole(op, bound)
        elif sums:
            self._sums(op, bound, sums, states)
        elif any(s == WHOLE for s in states):
            self._whole(op, bound)
        else:
            self._gives(
                op, DEFER if self._has_gradient(op) and bound.rule.defers else NOTHING, None
            )

    def _has_gradient(self, op: Op) -> bool:
        return any(self.graph.tensors[n].differentiable for n in op.outputs)

    def _wants_whole_gradients(self, op: Op, bound: BoundRule, factor: str | None) -> bool:
        """Whether gradients that are shares of the batch's would meet a backward that is not
        linear in them."""
        if bound.rule.defers or not self.batched or not self._has_gradient(op):
            return False
        return factor is None or bound.leaves_partial(factor)

    def _factor(self, op: Op, bound: BoundRule, states: Sequence[State]) -> tuple[str | None, bool]:
        """The batch's factor, and whether the op mixes samples of an operand.

        That operand is gathered from all data ranks. Where no other one says how the op may be
        split, the op runs whole on each of them.
        """
        name_of: dict[str, str] = {}
        again: list[str] = []
        mixed = False
        for i, (name, state) in enumerate(zip(op.inputs, states, strict=True)):
            dim = self.apart.get(name) if state == WHOLE else dim_of(state)
            if dim is None or self.graph.tensors[name].shape[dim] == 1:
                continue
            factor, _ = cut_factor(bound, bound.operands[i][dim], self.behind.get(name, 1))
            splits = factor is not None and self._may_split(bound, factor)
            if state == WHOLE:
                again += [factor] if factor is not None and splits else []
            elif factor is not None and splits:
                name_of[factor] = name
            elif self.behind.get(name, 1) > 1:
                raise needs_more(op, name)
            else:
                mixed = True
                self._mixes(op, bound, name, dim)
                if self.name is None and name in self.graph.inputs:
                    self.gathered.add(name)
        if len(name_of) > 1:
            pairs = " and ".join(f"{n} (index {f})" for f, n in name_of.items())
            self._against(op, f"pairs every sample with every other: {pairs}")
        return next(iter([*name_of, *again]), None), mixed

    def _mixes(self, op: Op, bound: BoundRule, name: str, dim: int) -> None:
        shape = list(self.graph.tensors[name].shape)
        self._against(
            op,
            f"mixes samples: dim {dim} of {name} {shape} holds the batch, and the op needs all of "
            f"it (rule {bound}), so every data rank gathers it",
        )

    def _splits(self, op: Op, bound: BoundRule, factor: str) -> None:
        if bound.rule.moves_inside(factor):
            self._against(op, "takes statistics over the whole batch")
        self.choices[op.name] = factor
        for i, name in enumerate(op.outputs):
            held = bound.holder(i, factor)
            if held is not None:
                self.states[name] = split(held)
            else:
                self.states[name] = PARTIAL if bound.factors[factor].kind == "summed" else WHOLE
        if self.length:
            self._follow_pieces(op, bound, factor)

    def _follow_pieces(self, op: Op, bound: BoundRule, factor: str) -> None:
        """How the pieces of results lie. Raises `BatchMixed` where an operand's do not lie so."""
        behind: dict[str, int] = {}
        for i, name in enumerate(op.inputs):
            dim = dim_of(self.states.get(name))
            if dim is not None and bound.operand_holder(i, factor) == dim:
                cut, own = cut_factor(bound, bound.operands[i][dim], self.behind.get(name, 1))
                if cut == factor:
                    behind[name] = own
        own = max(behind.values(), default=1)
        if len({*behind.values()}) > 1 or (own > 1 and needs_order(bound, factor)):
            raise needs_more(op, max(behind, key=lambda name: behind[name]))
        for i, name in enumerate(op.inputs):
            if name in behind or name in self.alike or bound.operand_holder(i, factor) is None:
                continue
            if places_before(bound, bound.operands[i], factor, own) > 1:
                raise needs_more(op, name)
        for i, name in enumerate(op.outputs):
            if bound.holder(i, factor) is not None:
                self.behind[name] = places_before(bound, bound.results[i], factor, own)

    def _may_split(self, bound: BoundRule, factor: str) -> bool:
        if bound.factors[factor].kind == "whole":
            return False
        if self.length:
            return bound.factors[factor].size % self.ways == 0 and stands_once(bound, factor)
        return leads(bound, factor)

    def _whole(self, op: Op, bound: BoundRule) -> None:
        """Every data rank runs the op on all samples; readers take their own of the result."""
        self._gives(op, NOTHING, WHOLE)
        sizes = {
            self.graph.tensors[name].shape[dim]: dim
            for name in op.inputs
            for dim in (self._samples_at(name),)
            if dim is not None
        }
        for name in op.outputs:
            shape = self.graph.tensors[name].shape
            for size, dim in sizes.items():
                if size in shape:
                    self.apart[name] = dim if shape[dim : dim + 1] == (size,) else shape.index(size)
            if self.length in shape[1:]:  # labels that were shifted along the sequence, say
                self.apart.setdefault(name, shape.index(self.length, 1))

    def _samples_at(self, name: str) -> int | None:
        state = self.states.get(name)
        return self.apart.get(name) if state == WHOLE else dim_of(state)

    def _sums(self, op: Op, bound: BoundRule, sums: Sequence[int], states: Sequence[State]) -> None:
        choice = self._passing(op, bound.rule, sums, states) if self._has_gradient(op) else None
        if choice is None:
            self._needs_whole(op, op.inputs[sums[0]])
            self._whole(op, bound)
            return
        for i, state in enumerate(states):
            once = state == WHOLE or (state is None and op.inputs[i] in self.drawn)
            if bound.rule.takes_partial(choice, i) and once:
                self._against(op, f"adds {op.inputs[i]} once to a sum over the batch")
        self._gives(op, choice, PARTIAL)

    def _passing(
        self, op: Op, rule: Rule, sums: Sequence[int], states: Sequence[State]
    ) -> str | None:
        """The choice by which partial sums at ``sums`` pass through an op; None: they do not.

        Of a product one factor may be a sum where no sample has a say in the others (a learned
        weight of a loss) and none is drawn: what these are is the same number in every share, so
        shares add up.
        """
        others = [i for i in range(len(states)) if i not in sums]
        drawn = {i for i in others if op.inputs[i] in self.drawn}
        if all(rule.carries_partial(i) for i in sums):
            return PASS_PARTIAL if all(map(rule.carries_partial, drawn)) else None
        free = not drawn and all(states[i] is None for i in others)
        return PASS_ALONE[sums[0]] if len(sums) == 1 and sums[0] in rule.alone and free else None

    def _gives(self, op: Op, choice: str, state: State) -> None:
        self.choices[op.name] = choice
        for name in op.outputs:
            self.states[name] = state

    def bound_rule(self, op: Op) -> BoundRule:
        """Of an op of this scope; bound once."""
        if op.name not in self.bound:
            self.bound[op.name] = bind(op, self.graph.tensors)
        return self.bound[op.name]

    def _needs_whole(self, op: Op, name: str) -> None:
        """Such as the share of tokens that each expert gets, in a loss for their balance."""
        self._against(
            op,
            f"needs the whole of {name}, a sum over the batch (that over a microbatch is another "
            "number, and what is made of it does not add up to that of the whole)",
        )

    def _against(self, op: Op, reason: str) -> None:
        self.obstacles[op.name] = f"op {op.kind!r} at {op.source} {reason}"

    # -- from the readers up -----------------------------------------------------------------------

    def pull(self, scopes: Mapping[str, Scope]) -> None:
        """Free tensors that all readers split along one dim are made in pieces."""
        wanted: dict[str, set[int | None]] = {}
        for name in self.graph.outputs:
            wanted.setdefault(name, set()).add(None)
        for op in reversed(self.graph.ops):
            if op.kind == "block":
                body = scopes[op.attrs["block"]]
                for inner, outer in zip(body.graph.inputs, op.inputs, strict=True):
                    wanted.setdefault(outer, set()).add(dim_of(body.states.get(inner)))
                continue
            self._pull_op(op, wanted)
            bound, choice = self.bound_rule(op), self.choices[op.name]
            for i, name in enumerate(op.inputs):
                held = bound.operand_holder(i, choice)
                wanted.setdefault(name, set()).add(held)
        for name in self.graph.inputs:
            dims = wanted.get(name, set())
            dim = next(iter(dims)) if len(dims) == 1 else None
            if self.states.get(name) is not None or dim is None:
                continue
            if self.name is None:  # how it enters is not ours to say
                self.pieces[name] = dim
            else:
                self.states[name] = self.entering[name] = split(dim)

    def _pull_op(self, op: Op, wanted: Mapping[str, set[int | None]]) -> None:
        if any(self.states.get(n) is not None for n in op.outputs):
            return
        bound = self.bound_rule(op)
        factors: set[str | None] = set()
        for i, name in enumerate(op.outputs):
            for dim in wanted.get(name, set()):
                held = () if dim is None else bound.results[i][dim]
                factors.add(next((f for f in held if bound.factors[f].size > 1), None))
        factor = next(iter(factors)) if len(factors) == 1 else None
        if factor is None or bound.factors[factor].kind != "parallel" or not leads(bound, factor):
            return
        self.choices[op.name] = factor
        for i, name in enumerate(op.outputs):
            held_at = bound.holder(i, factor)
            assert held_at is not None
            self.states[name] = split(held_at)


def dim_of(state: State) -> int | None:
    """The dim along which the batch splits a tensor, if it does."""
    return state.dim if state is not None and state.kind == "S" else None
