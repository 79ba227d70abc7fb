"""What a search is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.lowering.shared_experts import may_have_beside
from autopar.nouns.buckets import BUCKET_BYTES
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Graph
from autopar.nouns.layout import (
    AS_COMPUTED,
    BESIDE,
    EXPERT_PIECES,
    SHARED_EXPERTS,
    LayoutError,
    Pins,
    divisors,
)
from autopar.nouns.mesh import Mesh
from autopar.nouns.pieces import COUNTS
from autopar.nouns.plan import RunnerUp, Spread, Stage
from autopar.nouns.recompute import Recompute, policies
from autopar.nouns.reduction import LIBRARY
from autopar.pipeline.actions import Lists, to_text
from autopar.planner.ask.candidates import Candidate, Sharing, StateLayout
from autopar.planner.ask.experts import common_experts
from autopar.pricing.in_pieces import ONE
from autopar.pricing.offload import obstacle as offload_obstacle
from autopar.pricing.priced import Priced
from autopar.pricing.prices import Prices
from autopar.pricing.sends import Order
from autopar.rules.cut import Cuts
from autopar.rules.fusion import ALONE, Fusion
from autopar.rules.narrow_gathers import gathers_narrow
from autopar.rules.work import Work


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned: the model's graph, its batch, and where it is to run.

    ``obstacles``: why the batch may not be cut into microbatches; none: it may. ``uneven``: the
    backend can hold pieces of unequal size (JAX cannot). ``splits_batch``: data axes may.
    ``verbose``: tell every step of every search. ``fusion``: the kernels of compiled execution.
    """

    graph: Graph
    cuts: Cuts
    batch: int
    obstacles: tuple[str, ...]
    cluster: Cluster
    precision: str
    optimizer: str
    pins: Pins
    searcher: str = "portfolio"
    uneven: bool = True
    splits_batch: bool = True
    verbose: bool = False
    fusion: Fusion = ALONE
    framework: str = "torch"
    actions: Lists | None = None
    """Of each pipeline rank, where a file of them is pinned as the schedule."""
    clips: bool = False
    """Whether gradients are clipped by the norm of the whole."""
    worth_s: float = float("inf")
    """Seconds that a step must take less than: plans that do not are not looked for."""

    @property
    def policies(self) -> tuple[Recompute, ...]:
        """Recomputation that programs of the framework can do, the one that keeps most first."""
        return tuple(map(Recompute, policies(self.framework)))

    @property
    def bucket_bytes(self) -> int:
        """Of gradients that replicas add up at once; 0: as is fastest."""
        return self.pins.bucket or (0 if self.framework == "torch" else BUCKET_BYTES)

    @property
    def all_reduce(self) -> str:
        """By which replicas add up gradients; empty: as is fastest."""
        return self.pins.all_reduce or ("" if self.framework == "torch" else LIBRARY)

    @property
    def narrow_gathers(self) -> bool:
        """Whether weights that may be are gathered in 8 bits: it changes no number and moves
        less."""
        pins = self.pins
        return pins.gather != AS_COMPUTED and gathers_narrow(pins.precision)

    @property
    def pieces(self) -> tuple[int, ...]:
        """In how many pieces tensor-parallel collectives may run beside products."""
        if self.framework != "torch" or self.fusion is not ALONE or self.pins.precision:
            return ONE  # products in 8 bits are one call
        if self.pins.tp_pieces is not None:
            return (self.pins.tp_pieces,)
        return ONE if self.cluster.one_host else COUNTS

    @property
    def expert_pieces(self) -> tuple[int, ...]:
        """In how many pieces tokens may travel to their experts."""
        if self.framework != "torch":
            return ONE
        if self.pins.expert_pieces is not None:
            return (self.pins.expert_pieces,)
        return ONE if self.cluster.one_host else COUNTS

    @property
    def runs_beside(self) -> bool | None:
        """Whether shared experts run while tokens travel to the others; None: where that gains."""
        pinned = self.pins.shared_experts
        usual = (
            self.cluster.one_host or self.fusion is not ALONE
        )  # called inside of what is not compiled
        if self.framework != "torch" or (pinned is None and usual):
            return False
        return None if pinned is None else pinned == BESIDE

    @property
    def beside(self) -> frozenset[str]:
        """Keys of the ops of experts that have such ones next to them."""
        return frozenset() if self.runs_beside is False else may_have_beside(self.graph)

    @property
    def travels(self) -> str:
        """The pin under which tokens have to travel to experts; empty: they need not."""
        if self.pins.expert_pieces not in (None, 1):
            return f"{EXPERT_PIECES}={self.pins.expert_pieces}"
        return f"{SHARED_EXPERTS}={BESIDE}" if self.pins.shared_experts == BESIDE else ""

    def prices(self, mesh: Mesh, works: dict[tuple[object, ...], Work] | None = None) -> Prices:
        """Prices on ``mesh``, with its ``microbatch`` axis."""
        asked = self.cluster, mesh, self.precision, self.fusion
        works = {} if works is None else works
        beside = self.runs_beside, self.beside
        return Prices(*asked, None, self.pieces, self.expert_pieces, *beside, works)

    @property
    def offloads(self) -> bool:
        """Whether the search may put the optimizer's state into host memory where it is short."""
        free = self.pins.offload is None
        return free and not offload_obstacle(self.cluster, self.optimizer, self.framework)

    @property
    def pipeline_ranks(self) -> list[int]:
        """How many beside one may be tried."""
        if self.pins.pp is not None:
            return [self.pins.pp] if self.pins.pp > 1 else []
        return divisors(self.cluster.device_count)[1:]

    @property
    def sharing(self) -> Sharing:
        """What ranks may share where that is not pinned."""
        experts = tuple(common_experts(self.graph, self.framework))
        return Sharing(tuple(self.cuts.along), experts, self.cluster.levels[0].span)

    def legal(self, listed: Sequence[Candidate]) -> list[Candidate]:
        """Those that cut the batch no further than its samples may be taken apart.

        Raises:
            LayoutError: none does; the text says why.
        """
        whole = [c for c in listed if c.passes == 1]
        if not self.splits_batch:
            whole = [c for c in whole if c.parts == 1]
            if not whole:
                raise LayoutError(
                    "an op mixes the samples of the batch, so one data rank has all of them; leave "
                    "microbatch, dp_replicate and dp_shard out of --fix"
                )
            return whole
        if not self.obstacles:
            return list(listed)
        if not whole:
            raise LayoutError(
                f"the batch cannot be cut into {listed[0].passes} microbatches: "
                f"{self.obstacles[0]}; leave microbatch out of --fix, or give the whole batch of a "
                "rank" + (", and leave seq_slices out" if listed[0].slices > 1 else "")
            )
        return whole


@dataclass(frozen=True, slots=True)
class Decided:
    """All decisions of a plan; what follows from them is in `Lowered` and `Priced`.

    searcher: found the spread.
    stages:   of a pipeline; none: one stage, as ``layout`` says.
    order:    of a pipeline's actions.
    """

    candidate: Candidate
    layout: StateLayout
    spread: Spread
    searcher: str
    stages: tuple[Stage, ...] = ()
    order: Order | None = None

    @property
    def pp(self) -> int:
        """Groups of devices that hold stages."""
        return len({stage.device for stage in self.stages}) or 1

    @property
    def schedule(self) -> str:
        return "none" if self.order is None else self.order.schedule.name

    @property
    def actions(self) -> tuple[str, ...]:
        """Of each pipeline rank, where they do not follow from the schedule's name."""
        order = self.order
        return tuple(to_text(order.schedule.lists).split("\n")) if order and order.written else ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What is decided, and what is predicted of it."""

    decided: Decided
    priced: Priced


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best answer, the bound over all candidates, and the best of each family that lost.

    cluster: what the answer is for: the cluster that was asked for, or a part of it, with its
             groups in the order of ranks.
    tried:   candidates, and shapes of pipelines, that were looked at.
    alarms:  of layouts that were dropped since figures of them cannot be.
    """

    best: Answer
    lower_bound_s: float
    runners_up: tuple[RunnerUp, ...]
    tried: int
    cluster: Cluster
    alarms: tuple[str, ...] = ()
