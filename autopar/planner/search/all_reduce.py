"""Which layouts can add up gradients on two levels."""

from __future__ import annotations

from autopar.nouns.cluster import Cluster
from autopar.nouns.layout import ALL_REDUCE, LayoutError
from autopar.nouns.mesh import Mesh
from autopar.nouns.reduction import TWO_LEVEL
from autopar.planner.ask.question import Decided, Question
from autopar.pricing.state import StateSharding
from autopar.pricing.two_level import are_neighbours, data_cut
from autopar.pricing.units.moves import group_of


def check_all_reduce(question: Question, decided: Decided, state: StateSharding) -> None:
    """Raises `LayoutError` where an all-reduce is pinned that this layout cannot have."""
    pinned = question.pins.all_reduce
    if pinned is None:
        return
    asked, mesh = f"--fix {ALL_REDUCE}={pinned}", state.mesh
    if question.framework != "torch":
        raise LayoutError(f"{asked}: XLA decides how gradients are reduced; leave it out")
    if pinned != TWO_LEVEL:
        return
    if decided.stages:
        stages = len(decided.stages)
        raise LayoutError(
            f"{asked}: this layout has {stages} stages, and programs of one stage alone add up "
            f"on two levels so far; leave it out, or pin pp=1"
        )
    if not mesh.batch_axes:
        raise LayoutError(
            f"{asked}: no ranks of {mesh.trimmed()} hold the same parameters; leave it out, or pin "
            "dp_replicate and zero=0"
        )
    if state.fsdp:
        raise LayoutError(
            f"{asked}: FSDP2 reduces by collectives of its own at ZeRO {state.zero} over "
            f"dp_shard={state.shard}; leave it out, or pin dp_replicate and zero=0"
        )
    if data_cut(question.cluster, mesh) is None:
        raise LayoutError(f"{asked}: {_why_not(question.cluster, mesh)}; leave it out")


def _why_not(cluster: Cluster, mesh: Mesh) -> str:
    """Why the data axes of a mesh do not cross its outermost level with several ranks in each
    domain below, with the numbers."""
    axes = mesh.batch_axes
    named = " x ".join(f"{a}={mesh.size(a)}" for a in axes)
    if not are_neighbours(mesh, axes):
        return f"ranks along {named} of {mesh.trimmed()} are not evenly spaced"
    group = group_of(mesh, "+".join(axes))
    reach = group.size * group.stride
    level = next(level for level in cluster.levels if level.span >= reach)
    below = [inner for inner in cluster.levels if inner.span < reach]
    if not below:
        return (
            f"the {group.size} ranks along {named} lie in one domain of {level.name}, which has "
            f"{level.span}, so there is nothing to cross"
        )
    span = below[-1].span
    if group.stride >= span:
        return (
            f"ranks along {named} are {group.stride} apart and a domain of {below[-1].name} has "
            f"{span}, so each has one of them"
        )
    return (
        f"the {group.size} ranks along {named}, {group.stride} apart, do not fill domains of "
        f"{below[-1].name} of {span} alike"
    )
