"""Which factor of every op holds the batch, so that data axes (and microbatches) split it.

The batch enters with the inputs and is followed from op to op by the rules. On a data axis a tensor
is one of

=======  =========================================================================================
``Sd``   split: dim d holds the batch, as the major factor
``P``    a sum over the batch, each rank has its own part (the loss)
``R``    depends on the batch and is whole on every rank: what became of a sum by all_reduce
free     does not depend on the batch: whole, and where it has a gradient, deferred (``D``) down to
         the parameters it was made from
=======  =========================================================================================

An op that meets the batch gets the batch's factor as its choice. A sum passes through linear ops
(``P``); other ops need it whole (nothing). Free ops defer (``D``) where they have gradients, but
one whose result has a batch dim that all readers split (a mask that is expanded over the batch)
makes its own piece: a second pass, from the readers up, finds those.

Gradient accumulation cuts the batch over time, where no collective can reach: it is legal where no
value of one microbatch needs another one. `BatchFlow.obstacles` names what stands against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.plan import key
from autopar.nouns.sharding import PARTIAL, WHOLE, Placement, split
from autopar.rules.notation import BoundRule
from autopar.rules.pieces import cut_factor, places_before, stands_once
from autopar.rules.registry import bind
from autopar.rules.strategies import DEFER, NOTHING, PASS_PARTIAL

State = Placement | None
"""A placement on the data axes; None is free."""
_SPLIT_MOST = "PRS"


class BatchMixed(UserError):
    """An op mixes the samples of a batch in a way that data axes cannot split."""


@dataclass(frozen=True, slots=True)
class BatchFlow:
    """``choices`` by op key: what data axes do; for inputs of blocks by tensor key: a placement.

    ``tensors`` gives every tensor's placement on the data axes (``S0``, ``P``, ``D``, ``R``).
    ``obstacles`` are the reasons against gradient accumulation; none: it is legal. ``pieces``: of
    free inputs of the graph that all readers split along one dim that dim.
    """

    choices: Mapping[str, str]
    tensors: Mapping[str, str]
    obstacles: tuple[str, ...]
    pieces: Mapping[str, int] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()
    """Keys of tensors whose pieces do not lie one behind the other, see `autopar.rules.pieces`."""
    whole: frozenset[str] = frozenset()
    """Of the inputs that could be cut along sequences, those of which an op needs more than a
    piece: every rank is given all of them."""


def data_choices(graph: Graph, batch_dims: Mapping[str, int]) -> Mapping[str, str]:
    """What data axes do to every op and block input; nothing where the batch cannot be split."""
    return flow_or_obstacle(graph, batch_dims)[0].choices


def flow_or_obstacle(
    graph: Graph, batch_dims: Mapping[str, int]
) -> tuple[BatchFlow, BatchMixed | None]:
    """How the batch runs through the graph; where it cannot be split, nothing is and why."""
    try:
        return batch_flow(graph, batch_dims), None
    except BatchMixed as error:
        return batch_flow(graph, {}), error


def batch_flow(graph: Graph, batch_dims: Mapping[str, int], along_sequences: int = 0) -> BatchFlow:
    """Follows the batch through ``graph`` and the bodies of its blocks.

    ``batch_dims`` gives, for each batched input of the graph, the dim that holds the batch.
    ``along_sequences``: it is the dim of tokens, for as many ranks, and all are equally long. They
    may come to stand behind the samples in one dim (`autopar.rules.pieces`); what does not split
    evenly is whole on every rank, and obstacles mean nothing. Raises `BatchMixed` naming the first
    op that keeps the batch whole, and `UnruledOp`.
    """
    if not along_sequences:
        return _flow(graph, batch_dims)
    whole: frozenset[str] = frozenset()
    while True:
        flow = _flow(graph, batch_dims, whole, along_sequences)
        if flow.whole == whole:
            return flow
        whole = flow.whole


def _flow(
    graph: Graph,
    batch_dims: Mapping[str, int],
    whole: frozenset[str] = frozenset(),
    ways: int = 0,
) -> BatchFlow:
    """``whole``: of ``batch_dims``, inputs that are not cut."""
    batched = bool(batch_dims)
    length = 0
    if ways:
        length = max((graph.tensors[n].shape[dim] for n, dim in batch_dims.items()), default=0)
    scopes = {n: _Scope(n, block.body, batched, length, ways) for n, block in graph.blocks.items()}
    top = _Scope(None, graph, batched, length, ways)
    for name in graph.inputs:
        dim = batch_dims.get(name)
        top.states[name] = None if dim is None else split(dim)
        if dim is not None and name in whole:
            top.states[name], top.apart[name] = WHOLE, dim
    while True:
        before = {name: dict(scope.entering) for name, scope in scopes.items()}
        top.forward(scopes)
        if before == {name: scope.entering for name, scope in scopes.items()}:
            break
    if batched and any(top.states.get(name) is None for name in graph.outputs[:1]):
        _check_shares([top, *scopes.values()])
    for scope in scopes.values():
        scope.pull(scopes)
    top.pull(scopes)
    every = [top, *scopes.values()]
    return BatchFlow(
        {k: v for scope in every for k, v in scope.named_choices().items()},
        {k: v for scope in every for k, v in scope.named_states().items()},
        tuple(dict.fromkeys(o for scope in every for o in scope.all_obstacles())),
        top.pieces,
        frozenset(k for scope in every for k in scope.named_apart()),
        whole | top.gathered if ways else frozenset(),
    )


def inputs_in_pieces(graph: Graph, batch_dims: Mapping[str, int]) -> Mapping[str, int]:
    """Inputs without a batch dim that all of their readers split along one dim, and that dim; none
    where the batch cannot be split, or an op has no rule."""
    try:
        return batch_flow(graph, batch_dims).pieces
    except UserError:
        return {}


@dataclass(slots=True)
class _Scope:
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
    alike: set[str] = field(default_factory=set)
    """Tensors of one number everywhere, of which one piece is as good as another."""
    gathered: set[str] = field(default_factory=set)
    """Inputs of the graph of which an op needs more than a piece."""
    followed: dict[str, State] | None = None
    """What entered when the ops were last followed."""

    def forward(self, scopes: Mapping[str, _Scope]) -> None:
        """States and choices of all ops, from the inputs down."""
        self.obstacles.clear()
        self.states.update(self.entering)
        for op in self.graph.ops:
            if op.kind == "block":
                self._call(op, scopes)
            else:
                self._op(op)

    def _call(self, op: Op, scopes: Mapping[str, _Scope]) -> None:
        body = scopes[op.attrs["block"]]
        for inner, outer in zip(body.graph.inputs, op.inputs, strict=True):
            known, now = body.entering.get(inner), self.states.get(outer)
            body.entering[inner] = self._joined(known, now, op, inner)
            if body.behind.setdefault(inner, self.behind.get(outer, 1)) != self.behind.get(
                outer, 1
            ):
                raise self._apart(op, outer)
        if body.followed != body.entering:
            body.forward(scopes)
            body.followed = dict(body.entering)
        for inner, outer in zip(body.graph.outputs, op.outputs, strict=True):
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
        bound = self._bound(op)
        if op.kind == "full":
            self.alike.update(op.outputs)
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
            dim = self.apart.get(name) if state == WHOLE else _dim(state)
            if dim is None or self.graph.tensors[name].shape[dim] == 1:
                continue
            factor, _ = cut_factor(bound, bound.operands[i][dim], self.behind.get(name, 1))
            splits = factor is not None and self._may_split(bound, factor)
            if state == WHOLE:
                again += [factor] if factor is not None and splits else []
            elif factor is not None and splits:
                name_of[factor] = name
            elif self.behind.get(name, 1) > 1:
                raise self._apart(op, name)
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
        if any(entry.factor == factor for entry in bound.rule.internal):
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
            dim = _dim(self.states.get(name))
            if dim is not None and bound.operand_holder(i, factor) == dim:
                cut, own = cut_factor(bound, bound.operands[i][dim], self.behind.get(name, 1))
                if cut == factor:
                    behind[name] = own
        places = {*behind.values()}
        if len(places) > 1:
            raise self._apart(op, max(behind, key=lambda name: behind[name]))
        own = next(iter(places), 1)
        for i, name in enumerate(op.inputs):
            if name in behind or name in self.alike or bound.operand_holder(i, factor) is None:
                continue
            if places_before(bound, bound.operands[i], factor, own) > 1:
                raise self._apart(op, name)
        for i, name in enumerate(op.outputs):
            if bound.holder(i, factor) is not None:
                self.behind[name] = places_before(bound, bound.results[i], factor, own)

    def _apart(self, op: Op, name: str) -> BatchMixed:
        return BatchMixed(
            f"op {op.kind!r} at {op.source} needs more of {name} than one rank's tokens of every "
            "sample, which do not lie one behind the other there: keep samples and tokens in dims "
            "of their own up to there"
        )

    def _may_split(self, bound: BoundRule, factor: str) -> bool:
        if bound.factors[factor].kind == "whole":
            return False
        if self.length:
            return bound.factors[factor].size % self.ways == 0 and stands_once(bound, factor)
        return _leads(bound, factor)

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
        return self.apart.get(name) if state == WHOLE else _dim(state)

    def _sums(self, op: Op, bound: BoundRule, sums: Sequence[int], states: Sequence[State]) -> None:
        rule = bound.rule
        grad = any(self.graph.tensors[n].differentiable for n in op.outputs)
        if not grad or not all(rule.carries_partial(i) for i in sums):
            self._needs_whole(op, op.inputs[sums[0]])
            self._whole(op, bound)
            return
        for i, state in enumerate(states):
            if rule.carries_partial(i) and state != PARTIAL:
                self._against(op, f"adds {op.inputs[i]} once to a sum over the batch")
        self._gives(op, PASS_PARTIAL, PARTIAL)

    def _gives(self, op: Op, choice: str, state: State) -> None:
        self.choices[op.name] = choice
        for name in op.outputs:
            self.states[name] = state

    def _bound(self, op: Op) -> BoundRule:
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

    def pull(self, scopes: Mapping[str, _Scope]) -> None:
        """Free tensors that all readers split along one dim are made in pieces."""
        wanted: dict[str, set[int | None]] = {}
        for name in self.graph.outputs:
            wanted.setdefault(name, set()).add(None)
        for op in reversed(self.graph.ops):
            if op.kind == "block":
                body = scopes[op.attrs["block"]]
                for inner, outer in zip(body.graph.inputs, op.inputs, strict=True):
                    wanted.setdefault(outer, set()).add(_dim(body.states.get(inner)))
                continue
            self._pull_op(op, wanted)
            bound, choice = self._bound(op), self.choices[op.name]
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
        bound = self._bound(op)
        factors: set[str | None] = set()
        for i, name in enumerate(op.outputs):
            for dim in wanted.get(name, set()):
                held = () if dim is None else bound.results[i][dim]
                factors.add(next((f for f in held if bound.factors[f].size > 1), None))
        factor = next(iter(factors)) if len(factors) == 1 else None
        if factor is None or bound.factors[factor].kind != "parallel" or not _leads(bound, factor):
            return
        self.choices[op.name] = factor
        for i, name in enumerate(op.outputs):
            held_at = bound.holder(i, factor)
            assert held_at is not None
            self.states[name] = split(held_at)

    # -- what was found ----------------------------------------------------------------------------

    def named_choices(self) -> dict[str, str]:
        named = {
            key(self.name, op.name): self.choices.get(op.name, NOTHING)
            for op in self.graph.ops
            if op.kind != "block"
        }
        if self.name is not None:
            for name in self.graph.inputs:
                text = str(self._placement(name))
                named[key(self.name, name)] = "" if text == "R" else text
        return named

    def named_apart(self) -> list[str]:
        return [key(self.name, name) for name, places in self.behind.items() if places > 1]

    def named_states(self) -> dict[str, str]:
        return {key(self.name, name): str(self._placement(name)) for name in self.graph.tensors}

    def _placement(self, name: str) -> Placement:
        state = self.states.get(name)
        return _free(self.graph.tensors[name]) if state is None else state

    def all_obstacles(self) -> list[str]:
        """Reasons of ops, and free tensors of which each microbatch would need its own part."""
        obstacles = list(self.obstacles.values())
        for op in self.graph.ops:
            if op.kind == "block":
                continue
            for i, name in enumerate(op.inputs):
                held = self._bound(op).operand_holder(i, self.choices.get(op.name, NOTHING))
                if held is not None and _dim(self.states.get(name)) is None:
                    obstacles.append(
                        f"op {op.kind!r} at {op.source} takes a piece of {name}, which has the "
                        "size of the batch but does not come from it"
                    )
        return obstacles


def _check_shares(scopes: Sequence[_Scope]) -> None:
    """A loss that is no sum over the batch is divided by the ranks, and so are all gradients."""
    for scope in scopes:
        for op in scope.graph.ops:
            if op.kind != "block" and not scope._bound(op).rule.defers and scope._has_gradient(op):
                raise BatchMixed(
                    f"data axes cannot split the batch: op {op.kind!r} at {op.source} has a "
                    "backward that is not linear in the gradient, and the loss does not depend on "
                    "the batch. Compute it for every sample by itself"
                )


def _leads(bound: BoundRule, factor: str) -> bool:
    """The factor is the major one of every dim that holds it, and in no term twice."""
    for term in (*bound.operands, *bound.results):
        holders = [d for d in term if factor in d]
        if len(holders) > 1:
            return False
        for dim in holders:
            if next(f for f in dim if bound.factors[f].size > 1) != factor:
                return False
    return True


def _dim(state: State) -> int | None:
    return state.dim if state is not None and state.kind == "S" else None


def _free(tensor: Tensor) -> Placement:
    return Placement("D") if tensor.differentiable else WHOLE
