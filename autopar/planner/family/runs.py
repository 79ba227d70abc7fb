"""Layouts of a transformer under published software, priced from the graph of its figures.

The graph (`frontends.family`) is sharded as such software does it (`family.megatron`), lowered once
for each tensor-parallel degree, microbatch and way of running it, and priced as captured ones are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

from autopar.cost_models.columns import Number
from autopar.cost_models.precision import stream_bytes
from autopar.cost_models.software import Context, Software, default_software
from autopar.frontends.family.arch import Arch
from autopar.frontends.family.model import BATCH_DIMS, graph_of, kinds_of
from autopar.lowering.precision import at_precision
from autopar.lowering.spread import lower
from autopar.nouns.axes import CONTEXT, REPLICATE, SHARD, TENSOR
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Graph
from autopar.nouns.layout import Layout
from autopar.nouns.mesh import Mesh
from autopar.nouns.prediction import Memory
from autopar.nouns.recompute import KEEP_ALL
from autopar.nouns.style import Style
from autopar.pipeline.schedules.steady import SteadyClock
from autopar.planner.family.megatron import spread_of
from autopar.planner.family.stages import layers_of, stage_count
from autopar.pricing.cut_model import CutModel
from autopar.pricing.cuts import Cuts
from autopar.pricing.parts import parts_of
from autopar.pricing.pipeline import PipelinePrices, runs_of
from autopar.pricing.priced import alone
from autopar.pricing.prices import Prices
from autopar.pricing.sends import Ends, Order
from autopar.pricing.software.figures import Figures
from autopar.pricing.software.trainer import Trainer, trainer_of
from autopar.pricing.software_step import SteadyOrder
from autopar.pricing.state import StateSharding
from autopar.pricing.step_time import StepTime
from autopar.rules.cut import BatchCut, batch_cut
from autopar.rules.fusion import Fusion, fusion

DTYPES = {8: "float64", 4: "float32", 2: "bfloat16"}
DROPOUT = 0.1

# Edge of the keys' tiles of an attention kernel.
KEY_TILE = 128


@dataclass(frozen=True, slots=True)
class Way:
    """How layers are run on ``samples`` sequences. whole_scores: what the mask hides of attention
    is computed too."""

    tp: int
    cp: int
    context: Context
    sequence_parallel: bool
    style: Style
    drops: bool
    whole_scores: bool
    element_bytes: int
    samples: int


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One layout of a model under one software."""

    arch: Arch
    cluster: Cluster
    layout: Layout
    software: Software
    precision: str

    @property
    def _context(self) -> Context:
        """What ranks of a sequence do; a layout that trades rows for heads says it itself."""
        if self.layout.cp_head > 1:
            return "heads"
        return self.software.context if self.layout.cp > 1 else "ring"

    @property
    def way(self) -> Way:
        return Way(
            tp=self.layout.tp,
            cp=self.layout.cp,
            context=self._context,
            sequence_parallel=self.layout.sequence_parallel,
            style=self.software.style,
            drops=self.software.dropout,
            whole_scores=self.software.attention == "unfused",
            element_bytes=stream_bytes(self.precision),
            samples=self.layout.microbatch,
        )


def software_for(cluster: Cluster, layout: Layout, style: Style | None = None) -> Software:
    """What is usual on the cluster's devices, executed in ``style`` where that is given."""
    device = cluster.device
    usual = default_software(device.family, device.kind, layout.zero)
    return usual if style is None else replace(usual, style=style)


def run_on(
    arch: Arch,
    cluster: Cluster,
    layout: Layout,
    precision: str = "bf16",
    style: Style | None = None,
    software: Software | None = None,
) -> TrainingRun:
    """A legal layout, under what is usual unless ``software`` is declared; its peak is that which
    the devices see."""
    software = software or software_for(cluster, layout, style)
    return TrainingRun(arch, cluster, layout, replace(software, memory="device"), precision)


def step_s(run: TrainingRun, most_s: float = math.inf) -> float:
    """Seconds of a step; infinite where it takes more than ``most_s`` for certain."""
    staged = _staged(run)
    if staged.least_s > most_s:
        return math.inf
    return float(staged.step(*staged.stages.clocked(staged.runs, staged.order)).total_s)


def peak_bytes(run: TrainingRun) -> int:
    """Of the rank that needs most."""
    return max(memory.total for memory in memory_of(run))


def step_of(run: TrainingRun, constants: Mapping[str, Number] | None = None) -> StepTime:
    """Seconds of a step; ``constants`` as `trainer_of` takes them.

    Raises:
        NoGraph: figures that no graph says.
    """
    staged = _staged(run, constants)
    return staged.step(*staged.stages.clocked(staged.runs, staged.order))


def memory_of(run: TrainingRun) -> list[Memory]:
    """Of every pipeline rank at its peak, as the software counts it. Raises as `step_of`."""
    return _staged(run).memory()


@dataclass(frozen=True, slots=True)
class PricedRun:
    """memory: of the fullest rank, which is ``rank``. parts_s: what the step's seconds are for."""

    time: StepTime
    parts_s: Mapping[str, float]
    memory: Memory
    rank: int


def price(run: TrainingRun) -> PricedRun:
    """A run's step and its fullest rank. Raises as `step_of`."""
    staged = _staged(run)
    memories = staged.memory()
    rank = max(range(len(memories)), key=lambda i: (memories[i].total, -i))
    timeline_s, busy_s = staged.stages.clocked(staged.runs, staged.order)
    time = staged.step(timeline_s, busy_s)
    busiest = max(range(len(busy_s)), key=busy_s.__getitem__)
    each = [
        (staged.stages.model.stage_summary(*units), staged.stages.time(*units))
        for units, on in zip(staged.runs, staged.order.schedule.ranks, strict=True)
        if on == busiest
    ]
    passes = run.layout.microbatches / len(staged.order.schedule.routes)
    once_s = sum(float(one.reduce_s + one.first_s) for _, one in each)
    parts_s = parts_of(each, passes, timeline_s, once_s, time)
    return PricedRun(time, parts_s, memories[rank], rank)


@dataclass(frozen=True, slots=True)
class _Staged:
    """A run cut into stages; ``runs``: the units of each."""

    layout: Layout
    stages: PipelinePrices
    order: Order | SteadyOrder
    runs: list[tuple[int, int]]

    @property
    def least_s(self) -> float:
        """What the mean rank computes and waits for inside layers."""
        summary = self.stages.model.summary
        units = [summary.root, *(summary.bodies[name] for name in summary.calls)]
        passed_s = sum(
            u.forward_s + u.backward_s + u.moved_forward_s + u.moved_backward_s for u in units
        )
        return float(self.layout.microbatches * passed_s / self.layout.pp)

    def step(self, timeline_s: Number, busy_s: Sequence[Number]) -> StepTime:
        return self.stages.step(
            *(self.runs, self.order.schedule, timeline_s, busy_s),
            microbatches=self.layout.microbatches,
        )

    def memory(self) -> list[Memory]:
        peaks_of = self.order.held if isinstance(self.order, SteadyOrder) else None
        return self.stages.memory(self.runs, self.order.schedule, peaks_of)


def _staged(run: TrainingRun, constants: Mapping[str, Number] | None = None) -> _Staged:
    x = run.layout
    trainer = trainer_of(run.cluster, x, run.software, run.precision, run.arch.dim, constants)
    model = model_of(run, trainer)
    axes = (REPLICATE, SHARD, CONTEXT, TENSOR)
    mesh = Mesh(axes, (x.dp_replicate, x.dp_shard, x.cp, x.tp))
    precision = DTYPES[stream_bytes(run.precision)]
    state = StateSharding(x.zero, mesh, x.microbatches, precision, trainer=trainer)
    order = _order(x)
    stages = PipelinePrices(model, run.cluster, state, KEEP_ALL, x.pp)
    return _Staged(
        x, stages, order, runs_of(_ends(run.arch, run.way, stage_count(x)), order.schedule)
    )


def model_of(run: TrainingRun, trainer: Trainer) -> CutModel:
    """One microbatch on the ranks of a layout that share a sequence or split its ops, under its
    software."""
    x = run.layout
    # Each tensor-parallel rank sends its share (scatter-gather).
    drawn = _drawn(run.arch, run.way, parts=1 if x.sequence_parallel else x.tp)
    dtype = DTYPES[stream_bytes(run.precision)]
    mesh = drawn.cuts.lowered.mesh
    prices = Prices(run.cluster, mesh, dtype, drawn.fusion, trainer, figures=drawn.figures)
    return CutModel(drawn.cuts, None, prices, "torch")


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A model as all layouts have it that run its layers one way; ``figures`` are read off once."""

    cuts: Cuts
    fusion: Fusion
    figures: dict[Hashable, Figures] = field(default_factory=dict)


@lru_cache(maxsize=1024)
def _drawn(arch: Arch, way: Way, parts: int) -> _Drawn:
    """``parts``: of what is sent, of which each rank sends one."""
    if parts > 1:
        whole = _drawn(arch, way, parts=1)
        return replace(whole, cuts=whole.cuts.sending(parts))
    form = _form(arch, way)
    graph = _graph(form)
    mesh = Mesh((CONTEXT, TENSOR), (way.cp, way.tp))
    spread = spread_of(graph, mesh, way.sequence_parallel, way.context)
    lowered = lower(graph, spread, 1, _cut(form, way.cp))
    return _Drawn(Cuts.of(lowered), _kernels(form, way.style))


@dataclass(frozen=True, slots=True)
class _Form:
    """What the graph of a model hangs on."""

    arch: Arch
    samples: int
    drops: bool
    whole_scores: bool
    element_bytes: int


def _form(arch: Arch, way: Way) -> _Form:
    heads = way.tp * (way.cp if way.context == "heads" else 1)
    as_run = replace(
        arch,
        causal=arch.causal and not way.whole_scores,
        kv_heads=max(arch.kv_heads, heads),  # ranks that share a head have it each
        window=arch.window + KEY_TILE,
    )
    return _Form(as_run, way.samples, way.drops, way.whole_scores, way.element_bytes)


@lru_cache(maxsize=128)
def _graph(form: _Form) -> Graph:
    as_said = replace(form.arch, window=form.arch.window - KEY_TILE)
    kinds = tuple(
        replace(kind, windowed=kind.windowed and not form.whole_scores)
        for kind in kinds_of(as_said)
    )
    made = graph_of(form.arch, form.samples, DROPOUT * form.drops, kinds)
    return at_precision(made, DTYPES[form.element_bytes])


@lru_cache(maxsize=512)
def _cut(form: _Form, cp: int) -> BatchCut:
    return batch_cut(_graph(form), BATCH_DIMS, cp)


@lru_cache(maxsize=128)
def _kernels(form: _Form, style: Style) -> Fusion:
    return fusion(_graph(form), style)


def _order(layout: Layout) -> Order | SteadyOrder:
    if layout.pp == 1:
        return alone(layout.microbatches)
    return SteadyOrder(_steady(layout.schedule, layout.pp, layout.microbatches, layout.interleave))


@lru_cache(maxsize=1024)
def _steady(name: str, pp: int, microbatches: int, interleave: int) -> SteadyClock:
    return SteadyClock(name, pp, microbatches, interleave)


@lru_cache(maxsize=4096)
def _ends(arch: Arch, way: Way, stages: int) -> Ends:
    """Layers as even as they can be, what stands before them in the first stage and the rest in the
    last."""
    cuts = _drawn(arch, way, parts=1).cuts
    calls = [op.op.name for op in cuts.lowered.ops if op.bound is None]
    *inner, _ = layers_of(len(calls), stages)
    before = cuts.units.index(calls[0])
    return (*(before + done for done in accumulate(inner)), len(cuts.units))
