"""Candidates of one stage in the order of what they may still bring.

A family is the candidates of one mesh of model axes. Of each the fewest microbatches are solved
first; whether, and when, more of them are solved hangs on their `Prospect`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.nouns.axes import EXPERT, SEQUENCES
from autopar.nouns.mesh import Mesh
from autopar.planner.ask.candidates import Candidate
from autopar.planner.ask.question import Answer
from autopar.planner.search.one_stage import OneStage
from autopar.planner.search.prospects import Prospect, prospect
from autopar.planner.solve.solved import Solved, solve
from autopar.planner.solve.standings import Standings, Steps, beat

SHARED = (EXPERT, *SEQUENCES)
Families = Mapping[Mesh, Sequence[Candidate]]


@dataclass(frozen=True, slots=True)
class Known:
    """What has been learnt of families: bounds of their first candidates, and prospects."""

    bounds: dict[Mesh, float]
    prospects: dict[Mesh, list[Prospect]] = field(default_factory=dict)

    def promise_s(self, candidate: Candidate) -> float:
        """Seconds that the candidate is not expected to beat.

        Of a mesh of which nothing is known: fewer ranks that share, or as many with samples and
        experts of their own, compute as much in larger pieces and move less of activations, so
        their bound is one for these too.
        """
        mesh = candidate.model
        if mesh in self.prospects:
            return max(one.step_s(candidate.microbatches) for one in self.prospects[mesh])
        if mesh in self.bounds:
            return self.bounds[mesh]
        return max((self.bounds[one] for one in self._sharing_less(mesh)), default=0.0)

    def fitting_s(self, candidate: Candidate) -> float:
        """The same by what fits, beside `promise_s`: ranks that share less of sequences keep as
        much of activations, and of state. It grows less evenly with what is shared, and so says
        nothing of what should come first."""
        mesh = candidate.model
        if mesh in self.bounds:
            return 0.0
        alike = (m for m in self._sharing_less(mesh) if m.size(EXPERT) == mesh.size(EXPERT))
        known = (prospect for one in alike for prospect in self.prospects.get(one, ()))
        return max((prospect.step_s(candidate.microbatches) for prospect in known), default=0.0)

    def _sharing_less(self, mesh: Mesh) -> Iterator[Mesh]:
        return (one for one in self.bounds if _shares_less(one, mesh))


def try_families(
    alone: OneStage, firsts: Mapping[Mesh, Solved], families: Families, now: Standings
) -> Steps:
    """Solves and offers what may be faster than the best plan, the most promising first.

    ``firsts``: first candidates that have been solved; the others are when they come up.
    """
    question, solver = alone.question, alone.solver
    known = Known({mesh: first.bound_s for mesh, first in firsts.items()})
    order = {mesh: n for n, mesh in enumerate(families)}
    heap: list[tuple[float, int, int, Mesh]] = []

    def push(mesh: Mesh, index: int) -> None:
        if index < len(families[mesh]):
            promise_s = known.promise_s(families[mesh][index])
            heapq.heappush(heap, (promise_s, order[mesh], index, mesh))

    for mesh in families:
        push(mesh, 0)
    while heap:
        promised_s, _, index, mesh = heapq.heappop(heap)
        candidate = families[mesh][index]
        promise_s = known.promise_s(candidate)
        if now.compares and max(promise_s, known.fitting_s(candidate)) >= now.best_s:
            if index or promise_s < now.best_s:
                push(mesh, index + 1)
            elif mesh in firsts:
                now = beat(now, candidate, promise_s)
            continue
        if promise_s > promised_s:  # more is known than when it was pushed
            push(mesh, index)
            continue
        solved = firsts.get(mesh) if index == 0 else None
        solved = solved or solve(question, candidate, solver)
        if solved is not None:
            # Of a mesh whose fewest microbatches were left out the first that is solved counts.
            now = replace(now, bound_s=min(now.bound_s, solved.bound_s))
            if index == 0:
                known.bounds[mesh] = solved.bound_s
            answers: list[Answer] = []
            if solved.bound_s < now.best_s:
                solver.tell(f"{candidate.name}: bound {solved.bound_s * 1e3:.4g} ms")
                answers = alone.answers(solved, now)
                now = yield from alone.tried(solved, answers, now)
            else:
                now = beat(now, candidate, solved.bound_s)
            read = prospect(question, solved, answers)
            known.prospects.setdefault(mesh, []).append(read)
        if solved is not None or index:
            push(mesh, index + 1)
        now = replace(now, tried=now.tried + 1)
        yield now
        solver.check()
    return now


def _shares_less(one: Mesh, other: Mesh) -> bool:
    """On the same model axes, and by rows alone or by fewer heads too. Heads beside rows may move
    less than so many rows, and no less than the rows, or rows and fewer heads, that they stand
    beside."""
    alike = one.without(SHARED) == other.without(SHARED)
    return alike and all(other.size(axis) % one.size(axis) == 0 for axis in (EXPERT, *SEQUENCES))
