"""What a plan would be if devices had other memory: the time-memory frontier, asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autopar.nouns.cluster import Cluster
from autopar.planner.ask.question import Answer, Question
from autopar.planner.search.layouts import search_plan
from autopar.planner.solve.standings import NothingFits


@dataclass(frozen=True, slots=True)
class WithMemory:
    """The fastest plan for devices of ``memory_bytes``; None where nothing fits them."""

    memory_bytes: int
    best: Answer | None


def with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    """The same devices with as much memory each; itself for what the least of them has."""
    if memory_bytes == cluster.memory_bytes:
        return cluster
    groups = tuple(
        replace(group, device=replace(group.device, memory_bytes=memory_bytes))
        for group in cluster.groups
    )
    return replace(cluster, groups=groups)


def plans_by_memory(question: Question, sizes: Iterable[int]) -> Iterator[WithMemory]:
    """Of each memory, the least first, the plan that the search would choose."""
    for size in sorted(set(sizes)):
        asked = replace(question, cluster=with_memory(question.cluster, size))
        try:
            yield WithMemory(size, search_plan(asked).best)
        except NothingFits:
            yield WithMemory(size, None)
