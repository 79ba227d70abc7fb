"""From a model file and a cluster file to a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from autopar.frontends.dispatch import capture, executor
from autopar.frontends.loading import load_workload
from autopar.frontends.shared.captured import Captured
from autopar.lowering.lowered import Lowered
from autopar.lowering.precision import at_precision
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Graph
from autopar.nouns.imbalance import Imbalance
from autopar.nouns.layout import Pins
from autopar.nouns.plan import Plan
from autopar.nouns.style import Style, style_of
from autopar.nouns.workload import Workload
from autopar.pipeline.actions import Lists
from autopar.planner.advice.fewer import Fewer, fewer
from autopar.planner.advice.remedies import search_or_advise
from autopar.planner.ask.checks import (
    check_pins,
    check_style,
    check_ways,
    unsharded,
)
from autopar.planner.ask.dtypes import mixed_unit
from autopar.planner.ask.measured import Measured
from autopar.planner.ask.pins import read_pins
from autopar.planner.ask.question import Outcome, Question
from autopar.planner.ask.sequences import cuts_along, every_cut, in_slices
from autopar.planner.ask.unruled import check_allowed, check_registered, unruled
from autopar.planner.made import plan_of
from autopar.planner.search.expert_pieces import check_expert_pieces, check_expert_pins
from autopar.planner.search.expert_placement import check_placement_pin, order_of
from autopar.planner.search.kernels import asked_kernels
from autopar.planner.search.loss_chunks import asked_chunks, check_rows, searched_in_chunks
from autopar.planner.search.mlp_chunks import (
    Answered,
    Asked,
    Search,
    check_tokens,
    searched_mlp_chunks,
)
from autopar.planner.search.on_top import chosen
from autopar.planner.search.recipes import asked_recipe
from autopar.planner.search.reductions import check_reduce
from autopar.planner.search.seq_slices import check_slices, searched_seq_slices
from autopar.planner.search.tp_pieces import check_pieces, check_tp_pieces, with_effect
from autopar.planner.solve.solved import lowered_of
from autopar.rules.batch import BatchFlow, flow_or_obstacle
from autopar.rules.cut import Cut, Cuts
from autopar.rules.feed_forwards import with_mlp_chunks
from autopar.rules.fusion import ALONE, fusion
from autopar.rules.kept_whole import keep_whole
from autopar.rules.kernels import with_kernels
from autopar.rules.loss_heads import AS_MANY_AS_IT_TAKES, in_chunks
from autopar.rules.pieces import BatchMixed
from autopar.rules.uneven_routes import check_imbalance, with_imbalance

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """``replicated``: op kinds without a rule that the user lets run whole on every device.

    ``profile``: a database of `autopar profile` whose measured times replace the built-in ones;
    where it was measured with other ``libraries`` or on another ``processor``, progress says so.
    ``style``: how the program is to execute; None: as its framework does by itself.
    ``imbalance``: of routes to experts; None: as the profile has it, else they are even.
    ``verbose``: progress tells every step of every search.
    """

    searcher: str = "portfolio"
    replicated: tuple[str, ...] = ()
    profile: str | None = None
    libraries: str | None = None
    processor: str | None = None
    style: Style | None = None
    imbalance: Imbalance | None = None
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan with what it was made from.

    cluster:       what the plan uses of the one that was given, in the order of its ranks.
    obstacles:     what stands against data ranks or microbatches; layouts that were left out.
    fewer:         a part of the cluster that would be as fast.
    search_time_s: CPU seconds by phase, of a plan that was made from files.
    """

    plan: Plan
    workload: Workload
    cluster: Cluster
    captured: Captured
    graph: Graph
    lowered: Lowered
    unruled_ops: tuple[str, ...]
    obstacles: tuple[str, ...] = ()
    fewer: Fewer | None = None
    search_time_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Clock:
    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.process_time()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.process_time() - start


def plan(
    workload_ref: str,
    cluster_ref: str | Cluster,
    fix: Mapping[str, str] | None = None,
    options: Options | None = None,
    progress: Progress = lambda _: None,
    workload: Workload | None = None,
) -> PlanResult:
    """Plans ``"model.py:Name"`` for ``"cluster.yaml"`` or ``"local"``, or a ``workload`` of that
    name that is at hand, and for a cluster that is.

    Raises `UserError` with what was asked, the numbers, and the next thing to try.
    """
    from autopar.files.cluster_file import load_cluster

    options = options or Options()
    clock = _Clock()
    with clock.phase("load"):
        cluster = cluster_ref if isinstance(cluster_ref, Cluster) else load_cluster(cluster_ref)
        as_read = cluster.fingerprint
        pins, _ = read_pins(fix or {}, cluster.device_count)  # refused before the long work
        if options.profile is not None:
            from autopar.cost_models.profile_file import check_profile

            check_profile(Path(options.profile))
        workload = workload or load_workload(workload_ref)
        check_style(workload.framework, options.style)
        check_pins(pins, workload, cluster)
        if options.profile is not None:
            style = options.style or style_of(workload.framework)
            measured = Measured(options.profile, options.libraries, options.processor, progress)
            cluster = measured.cluster(cluster, style)
    progress(f"capturing {workload_ref}")
    with clock.phase("capture"):
        captured = capture(workload)
    if options.profile is not None and options.imbalance is None:
        routes = measured.routes(cluster, captured.fingerprint())
        options = replace(options, imbalance=routes)
    progress(f"searching layouts for {cluster.device_count} devices of {cluster.name}")
    with clock.phase("search"):
        result = plan_captured(captured, workload, cluster, workload_ref, fix, options, progress)
    made = result.plan
    if isinstance(cluster_ref, str) and cluster_ref != "local":
        marks = replace(made.fingerprints, cluster_file=as_read)
        made = replace(made, cluster_file=str(cluster_ref), fingerprints=marks)
    return replace(result, plan=made, search_time_s=clock.spent)


def plan_captured(
    captured: Captured,
    workload: Workload,
    cluster: Cluster,
    workload_ref: str,
    fix: Mapping[str, str] | None = None,
    options: Options | None = None,
    progress: Progress = lambda _: None,
) -> PlanResult:
    """Plans a model that is captured already."""
    options = options or Options()
    style = options.style or style_of(workload.framework)
    missing = _missing(captured, workload, options, progress)
    pins, actions = read_pins(fix or {}, cluster.device_count)
    check_pins(pins, workload, cluster)
    check_tp_pieces(pins, workload.framework, style)
    check_expert_pins(pins, workload.framework)
    check_placement_pin(pins, workload.framework, options.imbalance)
    check_slices(pins, workload.framework, style)
    base = at_precision(keep_whole(captured.graph, missing), workload.precision)
    batch_dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    flow, obstacle = cut = flow_or_obstacle(base, batch_dims)
    mixed = mixed_unit(captured, workload)
    pins = unsharded(pins, mixed) if mixed else pins
    of_all = base, captured, workload, cluster, options
    asked_of = partial(_asked, *of_all, actions=actions, cut=cut, progress=progress)
    pinned = pins, workload.framework, style, captured.samples, cluster
    answered = searched_mlp_chunks(asked_of(pins), *pinned, progress, search_or_advise)
    of = batch_dims, pins, workload.framework, style, progress
    answered = searched_seq_slices(answered, asked_of, *of)
    question, outcome, chunks = answered.question, answered.outcome, answered.loss_chunks
    on_top = chosen(question, outcome, options.imbalance)
    question, outcome = on_top.question, on_top.outcome
    made = plan_of(outcome, question, captured, workload, workload_ref, style, missing)
    made = replace(
        made,
        expert_imbalance=options.imbalance,
        loss_chunks=chunks,
        mlp_chunks=answered.mlp_chunks,
        prediction=replace(made.prediction, placing_saves_s=on_top.placing_saves_s),
        **on_top.decisions,
    )
    against = (*_against(flow, obstacle, mixed), *outcome.alarms)
    enough = None if outcome.best.decided.stages else fewer(on_top.searched, outcome)
    lowered = lowered_of(question, outcome.best.decided)
    check_pieces(question, lowered)
    check_expert_pieces(pins, lowered)
    made = with_effect(made, lowered)
    if chunks is not None:
        check_rows(lowered, chunks)
    if answered.mlp_chunks is not None:
        check_tokens(lowered, answered.mlp_chunks)
    used = outcome.cluster
    return PlanResult(
        made, workload, used, captured, question.graph, lowered, missing, against, enough
    )


def _asked(
    base: Graph,
    captured: Captured,
    workload: Workload,
    cluster: Cluster,
    options: Options,
    pins: Pins,
    actions: Lists | None,
    cut: tuple[BatchFlow, BatchMixed | None],
    progress: Progress,
) -> Asked:
    """How the questions about ``base``, the captured graph as it is to be computed, are asked.

    cut: how data ranks and microbatches may cut its batch, and what is against that.
    """
    batch_dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    flow, obstacle = cut
    style = options.style or style_of(workload.framework)
    cuts_of = partial(_cuts, batch_dims=batch_dims, pins=pins, workload=workload, cluster=cluster)

    @cache
    def graph_of(mlp: int | None, loss: int | None) -> Graph:
        graph = with_mlp_chunks(base, mlp)
        return in_chunks(_by_kernels(graph, pins, workload, cluster, options), loss)

    def answer(mlp: int | None, search: Search, worth_s: float) -> Answered:
        plain = graph_of(mlp, None)
        loss = asked_chunks(
            plain, pins.loss_chunks, workload.framework, style, captured.samples, cluster
        )
        graph = in_chunks(plain, loss)
        check_ways(graph, pins, obstacle, captured.samples, workload.framework)
        question = Question(
            graph=graph,
            cuts=cuts_of(graph),
            batch=captured.samples,
            obstacles=flow.obstacles,
            cluster=cluster,
            precision=workload.precision,
            optimizer=workload.optimizer,
            pins=pins,
            actions=actions,
            searcher=options.searcher,
            uneven=workload.framework != "jax",
            splits_batch=obstacle is None,
            fusion=fusion(graph) if style == "compiled" else ALONE,
            verbose=options.verbose,
            framework=workload.framework,
            clips=workload.clip_norm is not None,
            worth_s=worth_s,
        )
        check_reduce(question)
        question, loss, outcome = _searched(question, plain, cuts_of, loss, progress, search)
        return Answered(question, loss, mlp, outcome)

    return Asked(answer, graph_of)


def _against(flow: BatchFlow, obstacle: BatchMixed | None, mixed: str) -> Iterator[str]:
    """What stands against data ranks, microbatches and ZeRO."""
    if obstacle is not None:
        yield f"One data rank only: {obstacle}"
    else:
        yield from (f"No microbatches: {reason}." for reason in flow.obstacles)
    if mixed:
        yield f"No ZeRO: {mixed}."


def _missing(
    captured: Captured, workload: Workload, options: Options, progress: Progress
) -> tuple[str, ...]:
    """Op kinds without a rule, which are kept whole as the user allows."""
    execute = executor(workload.framework)
    missing = unruled(captured.graph, execute)
    check_allowed(captured.graph, missing, options.replicated)
    for note in check_registered(captured.graph, execute):
        progress(f"note: {note}")
    return tuple(missing)


def _by_kernels(
    graph: Graph, pins: Pins, workload: Workload, cluster: Cluster, options: Options
) -> Graph:
    """The graph with how uneven routes are, and what its ops may or are to run by."""
    if options.imbalance is not None:
        check_imbalance(graph, options.imbalance)
        devices = cluster.device_count
        graph = with_imbalance(graph, options.imbalance, order_of(pins), devices)
    framework = workload.framework
    style = options.style or style_of(framework)
    graph = asked_recipe(graph, pins.precision, framework, style, workload.precision, cluster)
    return with_kernels(graph, asked_kernels(graph, pins, framework, style, cluster))


def _searched(
    question: Question,
    plain: Graph,
    cuts_of: Callable[[Graph], Cuts],
    chunks: int | None,
    progress: Progress,
    search: Search,
) -> tuple[Question, int | None, Outcome]:
    """What is answered, in how many chunks of the loss head, and the answer; ``plain``: the graph
    with logits."""

    @cache
    def whole() -> Question:
        return replace(question, graph=plain, cuts=cuts_of(plain))

    answered = question
    if chunks == AS_MANY_AS_IT_TAKES:
        chunks, outcome = searched_in_chunks(question, plain, whole, progress, search)
        if chunks is None:
            answered = whole()
        else:
            answered = replace(question, graph=in_chunks(plain, chunks))
    else:
        outcome = search(question, progress)
    return replace(answered, cluster=outcome.cluster), chunks, outcome


def _cuts(
    graph: Graph, batch_dims: Mapping[str, int], pins: Pins, workload: Workload, cluster: Cluster
) -> Cuts:
    """How axes of the batch may cut the graph."""
    flow, obstacle = flow_or_obstacle(graph, batch_dims)
    if (pins.cp or 1) > 1:
        return cuts_along(graph, batch_dims, pins.cp or 1)
    cuts = Cuts(Cut(batch_dims, flow.choices))
    if (pins.seq_slices or 1) > 1:
        return in_slices(graph, cuts.samples, pins.seq_slices or 1)
    # what a JAX loss returns beside the loss may be of tokens, which ranks along cp cannot give
    beside = workload.framework == "jax" and len(graph.outputs) > 1
    if pins.cp is None and obstacle is None and not beside:
        return every_cut(graph, cuts.samples, cluster.device_count)
    return cuts
