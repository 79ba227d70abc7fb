"""Which devices of an unequal cluster a plan may use, and in which order its ranks have them.

Stages stand in the order of ranks: which kind has the model's first layers, which hold most
microbatches under 1F1B, and which its last ones is a choice. So is to leave devices idle: a kind
that would slow the others down, or those that are too many to make up equal groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain, combinations, permutations

from autopar.nouns.cluster import Cluster, DeviceGroup
from autopar.nouns.level import Level, slowest_levels
from autopar.planner.ask.resized import NoSuchCluster, joined

FEW_GROUPS = 3
"""Groups up to which all orders are tried; of more the given one and its reverse."""
FEW_KINDS = 4
"""Kinds of devices up to which any of them may be left idle; of more all but one."""


def parts(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, and where its devices differ parts of it."""
    yield from _distinct((cluster, *_parts(cluster)))


def orders(cluster: Cluster) -> Iterator[Cluster]:
    """Its groups in other orders that leave every domain whole."""
    if len(cluster.kinds) == 1:
        return
    counts = [group.count for group in cluster.groups]
    inner = [level.span for level in cluster.levels if level.span < cluster.device_count]
    free = all(count % span == 0 for count in counts for span in inner)
    if free and len(counts) <= FEW_GROUPS:
        listed = [*permutations(cluster.groups)]
    else:  # domains of one size, from the other end
        listed = [cluster.groups[::-1]]
    _, *others = _distinct((cluster, *(replace(cluster, groups=groups) for groups in listed)))
    yield from others


def _distinct(clusters: Iterable[Cluster]) -> Iterable[Cluster]:
    """The first of those with equal groups."""
    seen: dict[tuple[object, ...], Cluster] = {}
    for cluster in clusters:
        key = tuple((group.device, group.count, group.levels) for group in cluster.groups)
        seen.setdefault(key, cluster)
    return seen.values()


def _parts(cluster: Cluster) -> Iterator[Cluster]:
    """Some of its kinds of devices; then of each group as many as make up equal stages."""
    kinds, groups = cluster.kinds, cluster.groups
    if len(kinds) == 1:
        return
    sizes = range(len(kinds) - 1, 0, -1) if len(kinds) <= FEW_KINDS else (1,)
    every = []
    for chosen in chain.from_iterable(combinations(kinds, size) for size in sizes):
        same = [(kind.device, kind.levels) for kind in chosen]
        kept = [(g.device, g.levels or cluster.levels) in same for g in groups]
        every.append([g.count * k for g, k in zip(groups, kept, strict=True)])
    each = 2
    while each <= max(group.count for group in groups):
        every.append([group.count // each * each for group in groups])
        each *= 2
    for counts in every:
        with suppress(NoSuchCluster):  # part of a torus
            yield part_of(cluster, counts)


def part_of(cluster: Cluster, counts: Sequence[int]) -> Cluster:
    """The first ``counts`` devices of every group, at least one in all; the others are idle.

    Raises `NoSuchCluster` where a torus has no such part.
    """
    groups = [g for g, count in zip(cluster.groups, counts, strict=True) if count]
    left = [
        DeviceGroup(group.device, group.count - count)
        for group, count in zip(cluster.groups, counts, strict=True)
        if group.count > count
    ]
    starts = accumulate((group.count for group in cluster.groups), initial=0)
    ranges = [(start, start + n) for start, n in zip(starts, counts, strict=False) if n]
    used = [count for count in counts if count]
    views = [
        _levels(group.levels or cluster.levels, ranges, [count] if group.levels else used)
        for group, count in zip(groups, used, strict=True)
    ]
    own = any(view != views[0] for view in views)
    kept = [
        replace(group, count=count, levels=view if own else ())
        for group, count, view in zip(groups, used, views, strict=True)
    ]
    return replace(
        cluster,
        groups=tuple(kept),
        levels=slowest_levels(views),
        idle=(*cluster.idle, *left),
    )


def _levels(
    levels: Sequence[Level], ranges: Sequence[tuple[int, int]], counts: Sequence[int]
) -> tuple[Level, ...]:
    """Those that are left where only these ranges of ranks are used, see `joined`."""
    devices = sum(end - start for start, end in ranges)
    start = ranges[0][0] if len(ranges) == 1 else 0
    first, last = ranges[0][0] - start, ranges[-1][1] - 1 - start
    outer = next(level for level in levels if first // level.span == last // level.span)
    return joined((*levels[: levels.index(outer)], outer), devices, counts)
