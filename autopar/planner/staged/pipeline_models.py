"""Solved shardings, and what they say of every pipeline that has them.

The sharding of all ops depends on the tensor-parallel degree and on how many samples a microbatch
has on one data rank, not on stages, cuts or schedule: one `Model` for each such pair. The fastest
may leave parameters whole on every tensor-parallel rank, since their gradients meet once a step.
For shapes in which that does not fit, or takes long, there are two more (`shapes.LEAN`): one that
is charged for what state moves once a step, and one that holds nearly as little as any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from autopar.nouns.axes import OPS
from autopar.nouns.cluster import Cluster
from autopar.nouns.mesh import Mesh
from autopar.nouns.recompute import KEEP_ALL, Recompute
from autopar.nouns.zero import ZERO
from autopar.planner.ask.candidates import Candidate, StateLayout, model_mesh
from autopar.planner.ask.question import Question
from autopar.planner.problem.posed import ALL_OF_IT, LeastShares
from autopar.planner.problem.solving import Solver
from autopar.planner.solve.solved import Charged, Solved, hidden, solve
from autopar.planner.staged.shapes import FASTEST, MOVING_LESS, Shape
from autopar.pricing.cut_model import CutModel
from autopar.pricing.pipeline import Figure, PipelinePrices
from autopar.pricing.runs import Table
from autopar.pricing.stage_time import StageTime, stage_time
from autopar.pricing.state import StateSharding

Parts = tuple[int, ...]
"""Of a microbatch in a unit: 0 forward, 1 the way back to its inputs, 2 gradients of weights."""
FORWARD, INPUTS, BACKWARD, PASS = (0,), (1,), (1, 2), (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Whole:
    """All of a model as one stage under a layout: bytes of its state; seconds that offloading some
    of it takes at least."""

    layout: StateLayout
    state: StateSharding
    state_bytes: int
    streamed_s: float


@dataclass(slots=True)
class Model:
    """A solved sharding, for every shape with as many samples on as many tensor-parallel ranks.

    whole: all of the model as one stage without data traffic, by recomputation; alone: its stages.
    Where devices differ all this is on the slowest of them.
    """

    solved: Solved
    cuts: CutModel
    whole: dict[Recompute, StageTime]
    alone: dict[Recompute, PipelinePrices]
    layouts: dict[StateLayout, Whole] = field(default_factory=dict)
    """All of the model under each layout of state."""
    _staged: dict[tuple[StateSharding, Recompute, int], PipelinePrices] = field(
        default_factory=dict
    )
    _tables: dict[tuple[StateSharding, Recompute, int, Cluster], Table] = field(
        default_factory=dict
    )
    _plain: dict[tuple[Recompute, Cluster], Table] = field(default_factory=dict)
    _pass_s: dict[tuple[StateSharding, Recompute], float] = field(default_factory=dict)
    _waits: dict[tuple[Recompute, Parts], Table] = field(default_factory=dict)
    _paces: dict[tuple[Recompute, tuple[Cluster, ...]], tuple[dict[Cluster, float], float]] = field(
        default_factory=dict
    )

    @property
    def pass_s(self) -> float:
        """Forward and backward of one microbatch through all of the model."""
        return self.whole[KEEP_ALL].forward_s + self.whole[KEEP_ALL].backward_s

    def least_pass_s(
        self, fitting: Sequence[Whole], recompute: Recompute, cluster: Cluster
    ) -> float:
        """Forward and backward of one microbatch through all of the model, in the layout that moves
        least state with it."""
        whole = self.whole[recompute]
        free = any(not ZERO[one.state.zero].gradients for one in fitting)
        if free or len(cluster.kinds) > 1:  # moves none; or is moved faster elsewhere
            return whole.forward_s + whole.backward_s
        for one in fitting:
            if (one.state, recompute) not in self._pass_s:
                time = stage_time(self.solved.summary, one.state, cluster, recompute)
                self._pass_s[one.state, recompute] = time.forward_s + time.backward_s
        return min(self._pass_s[one.state, recompute] for one in fitting)

    def staged(self, state: StateSharding, recompute: Recompute, pp: int) -> PipelinePrices:
        """Its stages, whatever their schedule, under a layout of state."""
        key = state, recompute, pp
        if key not in self._staged:
            cluster = self.cuts.prices.cluster
            self._staged[key] = PipelinePrices(self.cuts, cluster, state, recompute, pp)
        return self._staged[key]

    def table(self, state: StateSharding, recompute: Recompute, pp: int, view: Cluster) -> Table:
        """Figures of all runs under that layout, on devices with this view of the cluster."""
        key = state, recompute, pp, view
        if key not in self._tables:
            self._tables[key] = self.staged(state, recompute, pp).on(view).table()
        return self._tables[key]

    def plain(self, recompute: Recompute, view: Cluster) -> Table:
        """Figures of all runs without data traffic and optimizer: no layout takes less."""
        key = recompute, view
        if key not in self._plain:
            table = self._plain[key] = self.alone[recompute].on(view).table()
            table[[Figure.REDUCE, Figure.UPDATE]] = 0.0
        return self._plain[key]

    def pace(self, views: Sequence[Cluster], recompute: Recompute) -> Pace:
        """How fast ranks with these views of the cluster are, beside the slowest devices."""
        if len(self.cuts.prices.cluster.kinds) == 1:
            return Pace(len(views), 1.0)
        distinct = tuple(dict.fromkeys(views))
        key = recompute, distinct
        if key not in self._paces:
            slow = self._units_s(self.cuts.prices.cluster, recompute)
            own = np.stack([self._units_s(view, recompute) for view in distinct])
            # With w of each rank any weights, and every unit on some rank: the sum over ranks of
            # w times its work is at least that over units of the least of w times what they take.
            weights = slow.sum() / own.sum(axis=(1, 2))
            least = (weights[:, None] * own.sum(axis=1)).min(axis=0).sum() / slow.sum()
            some = own.min(axis=0) > 0
            fastest = (slow[some] / own.min(axis=0)[some]).max(initial=1.0)
            self._paces[key] = dict(zip(distinct, weights / least, strict=True)), float(fastest)
        speeds, fastest = self._paces[key]
        return Pace(float(sum(speeds[view] for view in views)), fastest)

    def least_waits_s(self, recompute: Recompute, ranks: int, parts: Parts) -> float:
        """Of all ranks together, what these ``parts`` of a microbatch take at least in the first
        stages of the ranks before each, or in the last of those behind: a stage takes no less than
        a unit of its own."""
        key = recompute, parts
        if key not in self._waits:
            each = self._units_s(self.cuts.prices.cluster, recompute)
            self._waits[key] = np.sort(each[list(parts)].sum(axis=0)).cumsum().cumsum()
        waits = self._waits[key]
        return float(waits[min(ranks - 1, len(waits)) - 1]) if ranks > 1 else 0.0

    def _units_s(self, view: Cluster, recompute: Recompute) -> Table:
        """[3, units] of every unit alone: forward, the way back to its inputs, gradients of
        weights."""
        prices = self.alone[recompute].on(view)
        each = [prices.figures(unit, unit + 1) for unit in range(len(self.cuts.units))]
        forward, backward, weights = np.array(each).T[: Figure.WEIGHTS + 1]
        return np.stack([forward, backward - weights, weights])


@dataclass(frozen=True, slots=True)
class Pace:
    """``ranks``: at most how many of the slowest devices do as much as all ranks together;
    ``fastest``: at most how many times as fast as there any part of the model is somewhere."""

    ranks: float
    fastest: float


@dataclass(frozen=True, slots=True)
class Likeness:
    """What of a model is read off for a shape of other samples: the share of its seconds, and of
    the bytes that a microbatch keeps. ``freed``: bytes that other shardings may free of it all;
    ``least``: the shares of state and of what is kept that none can do without."""

    seconds: float = 1.0
    bytes: float = 1.0
    freed: int = 0
    least: LeastShares = ALL_OF_IT


ITSELF = Likeness()


def _bare(candidate: Candidate) -> Charged:
    """What is `hidden`, without the adding up of gradients: shardings that spare it keep more of
    activations, which ranks of a pipeline keep of several microbatches, so that plans that memory
    binds take longer, though others take less."""
    return hidden(candidate.data, adds=False)


@lru_cache(maxsize=1 << 10)
def _beside_ops(mesh: Mesh) -> Mesh:
    return mesh.without(OPS)


@dataclass(slots=True)
class Models:
    """Solved shardings by tensor-parallel degree and samples, each solved when first asked for."""

    question: Question
    solver: Solver
    alone: Model | None = None
    """Of one device."""
    _sample_s: float = 0.0
    """Of forward and backward, at least, on one tensor-parallel rank of the slowest kind."""
    _models: dict[tuple[Mesh, int], Model | None] = field(default_factory=dict)
    _lean: dict[tuple[Mesh, int, int], Model | None] = field(default_factory=dict)

    def of(self, shape: Shape) -> Model | None:
        """None where the model cannot be split so, or ranks would do the same work; of a lean shape
        also where its fastest sharding is lean enough."""
        key = shape.candidate.model, shape.samples
        if shape.lean != FASTEST:
            lean = *key, shape.lean
            if lean not in self._lean:
                self._lean[lean] = self._leaner(shape, self._models.get(key))
            return self._lean[lean]
        if key not in self._models:
            self._models[key] = None
            solved = solve(self.question, shape.candidate, self.solver, _bare(shape.candidate))
            if solved is not None and not solved.repeats:
                self.add(solved)
        return self._models[key]

    def known(self, shape: Shape) -> Model | None:
        """As `of`, and None where it is not solved yet; no sharding of the shape is faster."""
        return self._models.get((shape.candidate.model, shape.samples))

    def like(self, shape: Shape) -> tuple[Model, Likeness] | None:
        """What is most like a shape that is not solved yet: the same ranks with the fewest samples
        more, or the most of those with less. None where it is solved, or nothing is known."""
        mesh, own = shape.candidate.model, shape.samples
        if (mesh, own) in self._models:
            return None
        known = {n: model for (of, n), model in self._models.items() if of == mesh and model}
        if not known:
            return None
        samples = min((n for n in known if n > own), default=max(known))
        model, share = known[samples], own / samples
        # Fewer samples take no less each; more of them, no less, nor less than what bounds all.
        seconds = max(min(1.0, share), self.least_pass_s(shape) / model.pass_s)
        solved = model.solved
        return model, Likeness(seconds, share, solved.squeezable, solved.least)

    def _leaner(self, shape: Shape, fastest: Model | None) -> Model | None:
        """The fastest sharding that is charged for what state moves once a step, or under a limit
        near the least that any holds; None where that is one which there is already."""
        if fastest is None:
            return None
        posed = fastest.solved.posed
        lean_limit = fastest.solved.lean_limit
        if lean_limit is None:
            return None
        candidate, limit = fastest.solved.candidate, None
        charged = _bare(candidate)
        if shape.lean == MOVING_LESS:
            # A step is the microbatches' passes, one for each rank more, and what moves in between.
            passes = shape.candidate.passes + shape.pp - 1
            exposed = shape.candidate.passes / passes
            charged = replace(charged, exposed=exposed)
        else:
            limit = lean_limit
        solved = solve(self.question, candidate, self.solver, charged, limit, posed)
        if solved is None or solved.repeats:
            return None
        moving_less = self._lean.get((candidate.model, shape.samples, MOVING_LESS))
        known = (one.solved for one in (fastest, moving_less) if one is not None)
        same = any(
            solved.posed is one.posed
            and np.array_equal(solved.solution.choice, one.solution.choice)
            for one in known
        )
        return None if same else self._model(solved)

    def add(self, solved: Solved) -> None:
        """For every shape with as many samples on as many tensor-parallel ranks."""
        candidate = solved.candidate
        samples = self.question.batch // (candidate.parts * candidate.microbatches)
        self._models[candidate.model, samples] = self._model(solved)

    def _model(self, solved: Solved) -> Model:
        question, candidate = self.question, solved.candidate
        alone = StateSharding(0, candidate.model, 1, question.precision, question.optimizer)
        cuts = solved.model
        whole, stages = {}, {}
        for recompute in question.policies:
            whole[recompute] = stage_time(solved.summary, alone, question.cluster, recompute)
            stages[recompute] = PipelinePrices(cuts, question.cluster, alone, recompute, 1)
        return Model(solved, cuts, whole, stages)

    def solve_alone(self, samples: int) -> None:
        """What a sample takes at least: as much as where one device computes so many at once."""
        slices = self.question.pins.seq_slices or 1
        alone = Candidate(1, model_mesh(1), self.question.batch // samples, slices)
        model = self.of(Shape(1, alone, samples))
        if model is not None:
            self._sample_s = model.pass_s / samples
            self.alone = model

    def least_pass_s(self, shape: Shape) -> float:
        """Forward and backward of one microbatch through all of the model, at least, of a shape
        that is not solved yet."""
        model = shape.candidate.model
        pass_s = self._sample_s * shape.samples / model.device_count
        for (theirs, samples), other in self._models.items():
            if other is not None and _beside_ops(theirs) == _beside_ops(model):
                # More samples take no less, fewer of them no less each; of twice the ranks each has
                # half of the work at least.
                more, left = divmod(model.ways(OPS), theirs.ways(OPS))
                if more and not left:
                    part = min(1.0, shape.samples / samples) / more
                    pass_s = max(pass_s, other.pass_s * part)
        return pass_s

    @property
    def most_units(self) -> float:
        """Between which any sharding of the model can be cut."""
        known = [len(model.cuts.units) for model in self._models.values() if model is not None]
        return max(known, default=float("inf"))
