"""A plan of what a search gave: decisions, fingerprints, prediction."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from autopar.cost_models.physics import check
from autopar.frontends.shared.captured import Captured
from autopar.nouns.cluster import Cluster
from autopar.nouns.plan import Fingerprints, Plan, Stage
from autopar.nouns.prediction import Prediction
from autopar.nouns.style import Style
from autopar.nouns.workload import Workload, training
from autopar.planner.ask.candidates import StateLayout
from autopar.planner.ask.question import Outcome, Question
from autopar.pricing.bands import memory_band, time_band
from autopar.pricing.bounds import prediction_bounds
from autopar.pricing.priced import Priced
from autopar.pricing.utilization import cluster_peak_s


def plan_of(
    outcome: Outcome,
    question: Question,
    captured: Captured,
    workload: Workload,
    workload_ref: str,
    style: Style,
    kept_whole: Sequence[str],
) -> Plan:
    """``kept_whole``: op kinds that run whole on every device, as asked."""
    best = outcome.best.decided
    return Plan(
        workload=workload_ref,
        framework=workload.framework,
        spreads=(best.spread,),
        stages=best.stages or (_only_stage(best.layout),),
        microbatches=best.candidate.microbatches,
        seq_slices=best.candidate.slices if best.candidate.slices > 1 else None,
        style=style,
        precision=workload.precision,
        optimizer=workload.optimizer,
        schedule=best.schedule,
        actions=best.actions,
        fingerprints=Fingerprints(
            model=captured.fingerprint(),
            cluster=question.cluster.fingerprint,
            profile=_profile_name(question.cluster),
            tool=version("autopar"),
            training={**training(workload), **captured.digests},
        ),
        prediction=_prediction(outcome.best.priced, outcome.lower_bound_s, question, captured),
        runners_up=outcome.runners_up,
        replicated_ops=tuple(kept_whole),
        searcher=best.searcher,
        clip_norm=None if workload.clip_norm is None else float(workload.clip_norm),
    )


def _only_stage(layout: StateLayout) -> Stage:
    return Stage(zero=layout.zero, recompute=layout.recompute, offload=layout.offload)


def _profile_name(cluster: Cluster) -> str:
    measured = any(group.device.rates for group in cluster.groups)
    return f"measured {cluster.fingerprint}" if measured else "built-in"


def _prediction(
    best: Priced, lower_bound_s: float, question: Question, captured: Captured
) -> Prediction:
    seconds = best.time.total_s
    cluster = question.cluster
    at_peak_s = cluster_peak_s(question.graph, cluster)
    made = Prediction(
        step_time_s=seconds,
        lower_bound_s=lower_bound_s,
        compute_time_s=best.time.compute_s,
        exposed_communication_s=best.time.exposed_s + best.time.model_communication_s,
        tokens_per_s=captured.tokens / seconds if captured.tokens else None,
        mfu=at_peak_s / seconds,
        memory_bytes=best.memory,
        forward_time_s=best.time.forward_s,
        optimizer_time_s=best.time.optimizer_s,
        waiting_time_s=best.time.waiting_s,
        time_band_s=time_band(seconds, cluster),
        memory_band_bytes=memory_band(best.memory.total),
    )
    check(prediction_bounds(made, captured.tokens))
    return made
