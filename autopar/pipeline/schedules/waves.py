"""Schedules that run through the ranks in both directions: Hanayo's waves, Chimera.

hanayo   2w stages a rank, down and up the ranks w times; every turn is on one rank, without a send
         (Liu et al. 2023, 3.2)
chimera  every rank holds a stage of each of two pipelines that run from both ends, half of the
         microbatches in each; a part of the model is two stages with the same parameters (Li and
         Hoefler 2021, 3.1)

The lists are played (`autopar.pipeline.greedy`) with B twice as long as F, in the memory of 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.actions import Action, Schedule
from autopar.pipeline.greedy import Setting, shortest


def hanayo(pp: int, microbatches: int, waves: int = 1) -> Schedule:
    ranks = [*range(pp), *reversed(range(pp))] * waves
    return _played("hanayo", ranks, [range(len(ranks))], [0] * microbatches, 2 * waves * pp)


def chimera(pp: int, microbatches: int, _: int = 1) -> Schedule:
    ranks = [*range(pp), *reversed(range(pp))]
    route = [i % 2 for i in range(microbatches)]
    return _played("chimera", ranks, [range(pp), range(pp, 2 * pp)], route, pp)


def _played(
    name: str,
    ranks: Sequence[int],
    routes: Sequence[Sequence[int]],
    route: Sequence[int],
    limit: int,
) -> Schedule:
    setting = Setting(ranks, routes, route, [limit] * (max(ranks) + 1), _twice, split=False)
    stages = tuple(tuple(passed) for passed in routes)
    return Schedule(name, tuple(ranks), stages, tuple(route), shortest(setting))


def _twice(action: Action) -> float:
    return 1.0 if action.kind == "F" else 2.0
