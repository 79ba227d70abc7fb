"""From a model file and a cluster file to a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from autopar.frontends.dispatch import capture, executor
from autopar.frontends.loading import load_workload
from autopar.frontends.shared.captured import Captured
from autopar.lowering.lowered import Lowered
from autopar.lowering.precision import at_precision
from autopar.nouns.batch import sample_dims
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Graph
from autopar.nouns.plan import Plan
from autopar.nouns.style import Style, style_of
from autopar.nouns.workload import Workload
from autopar.planner.advice.fewer import Fewer, fewer
from autopar.planner.advice.remedies import search_or_advise
from autopar.planner.ask.checks import (
    check_pins,
    check_style,
    unsharded,
)
from autopar.planner.ask.dtypes import mixed_unit
from autopar.planner.ask.measured import Measured
from autopar.planner.ask.pins import read_pins
from autopar.planner.ask.unruled import check_allowed, check_registered, unruled
from autopar.planner.asked import asked
from autopar.planner.made import plan_of
from autopar.planner.options import Options
from autopar.planner.search.expert_pieces import check_expert_pieces, check_expert_pins
from autopar.planner.search.expert_placement import check_placement_pin
from autopar.planner.search.layouts import Progress
from autopar.planner.search.loss_chunks import check_rows
from autopar.planner.search.mlp_chunks import (
    check_tokens,
    searched_mlp_chunks,
)
from autopar.planner.search.on_top import chosen
from autopar.planner.search.seq_slices import check_slices, searched_seq_slices
from autopar.planner.search.shared_experts import check_shared_experts, check_shared_pin
from autopar.planner.search.tp_pieces import check_pieces, check_tp_pieces, with_effect
from autopar.planner.solve.solved import lowered_of
from autopar.rules.batch import BatchFlow, flow_or_obstacle
from autopar.rules.kept_whole import keep_whole
from autopar.rules.pieces import BatchMixed


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
    usual = style_of(workload.framework)
    styles = [options.style or usual]
    if options.styles:
        styles = [usual] if workload.framework == "jax" else [*options.styles]
    profile = options.profile or options.at_hand(cluster, workload.framework)
    clusters = dict.fromkeys(styles, cluster)
    if profile is not None:
        with clock.phase("load"):
            versions = options.libraries(workload.framework)
            measured = Measured(profile, versions, options.processor, progress)
            clusters = {style: measured.cluster(cluster, style) for style in styles}
    progress(f"capturing {workload_ref}")
    with clock.phase("capture"):
        captured = capture(workload)
    if profile is not None and options.imbalance is None:
        routes = measured.routes(cluster, captured.fingerprint())
        options = replace(options, imbalance=routes)
    progress(f"searching layouts for {cluster.device_count} devices of {cluster.name}")

    def planned(style: Style) -> PlanResult:
        on, own = clusters[style], replace(options, style=style)
        return plan_captured(captured, workload, on, workload_ref, fix, own, progress)

    with clock.phase("search"):
        result = _fastest(styles, planned, progress)
    made = result.plan
    if isinstance(cluster_ref, str) and cluster_ref != "local":
        marks = replace(made.fingerprints, cluster_file=as_read)
        made = replace(made, cluster_file=str(cluster_ref), fingerprints=marks)
    return replace(result, plan=made, search_time_s=clock.spent)


def _fastest(
    styles: Sequence[Style], planned: Callable[[Style], PlanResult], progress: Progress
) -> PlanResult:
    """Of the plans in several styles; the first of those that are as fast.

    Raises `UserError`, that of the first style, where there is a plan in none.
    """
    if len(styles) == 1:
        return planned(styles[0])
    results: list[PlanResult] = []
    errors: list[UserError] = []
    for style in styles:
        try:
            results.append(planned(style))
        except UserError as error:
            errors.append(error)
            progress(f"--style {style}: {error}")
        else:
            progress(f"--style {style}: {1e3 * results[-1].plan.prediction.step_time_s:.2f} ms")
    if not results:
        raise errors[0]
    return min(results, key=lambda result: result.plan.prediction.step_time_s)


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
    check_shared_pin(pins, workload.framework, style)
    check_placement_pin(pins, workload.framework, options.imbalance)
    check_slices(pins, workload.framework, style)
    base = at_precision(keep_whole(captured.graph, missing), workload.precision)
    batch_dims = sample_dims(captured.batch)
    flow, obstacle = cut = flow_or_obstacle(base, batch_dims)
    mixed = mixed_unit(captured, workload)
    pins = unsharded(pins, mixed) if mixed else pins
    of_all = base, captured, workload, cluster, options
    asked_of = partial(asked, *of_all, actions=actions, cut=cut, progress=progress)
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
    check_shared_experts(pins, lowered)
    made = with_effect(made, lowered)
    if chunks is not None:
        check_rows(lowered, chunks)
    if answered.mlp_chunks is not None:
        check_tokens(lowered, answered.mlp_chunks)
    used = outcome.cluster
    return PlanResult(
        made, workload, used, captured, question.graph, lowered, missing, against, enough
    )


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
