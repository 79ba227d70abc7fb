"""What layers that differ in strategy could gain at most over layers that are all alike.

    python -m benchmarks.uneven_layers [--only "8b on 8,70b on 256"] [--json]

On one mesh, a layer that lies, keeps and shares otherwise than its neighbours adds its own seconds
and its own bytes, as in the search of Galvatron (Miao et al. 2022). So a plan whose layers differ
lies on a line between plans whose layers are alike: of ``k`` layers of one and the rest of another.
Every plan of one stage that a search prices is such a point (seconds, bytes), shardings that hold
less than the fastest among them; ``mixed_s`` is the least that a line between two of a mesh takes
where its bytes are the device's limit. Nothing is charged for moving activations where neighbours
differ, and no layer is rounded: what is gained is less. ``searched_s`` is the step of the free
search, pipelines among its plans.

Recomputation of some layers and not of others is searched as it is; what is shown is left beside.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from autopar.__main__ import SELDOM
from autopar.frontends.dispatch import capture
from autopar.nouns.mesh import Mesh
from autopar.planner.ask.question import Answer
from autopar.planner.planning import plan_captured
from autopar.planner.problem.posed import least_used
from autopar.planner.search.one_stage import OneStage
from autopar.planner.solve.solved import Solved, solve
from autopar.planner.solve.standings import Standings
from benchmarks.figures import Target, show
from benchmarks.free_and_pinned import CASES

HELD = (0.02, 0.1, 0.25, 0.5, 0.75)
"""What leaner shardings hold beyond the least, as shares of what the fastest does."""
WORTH = 0.025
"""A gain below this is less than prices can tell: half of the median error of published steps
(`benchmarks.published`, dense)."""

Key = tuple[Mesh, int]
"""Axes with their sizes, and microbatches."""


@dataclass(frozen=True, slots=True)
class Point:
    step_s: float
    bytes: int


@dataclass(slots=True)
class Seen:
    """The plans of one stage that a search priced, by mesh; ``limit``: bytes of a device."""

    points: dict[Key, set[Point]] = field(default_factory=lambda: defaultdict(set))
    limit: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Also prices leaner shardings of every candidate that is solved, and layouts whose state
        has no room: layers may mix them with others."""
        answers = OneStage.answers

        def with_leaner(search: OneStage, solved: Solved, now: Standings) -> list[Answer]:
            fastest = answers(search, solved, now)
            self.add(fastest)
            least = least_used(solved.folded.problem)
            for held in HELD:
                limit = int(least + held * (solved.solution.peak - least))
                question, solver = search.question, search.solver
                lean = solve(question, solved.candidate, solver, None, limit, solved.posed)
                if lean is not None:
                    self.add(answers(search, lean, now))
            return fastest

        with (
            mock.patch.object(OneStage, "answers", with_leaner),
            mock.patch.object(OneStage, "_with_room", lambda search, solved, listed: listed),
        ):
            yield

    def add(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            mesh = answer.decided.layout.mesh(answer.decided.candidate.model)
            key = mesh, answer.decided.candidate.microbatches
            memory = answer.priced.memory
            self.points[key].add(Point(answer.priced.time.total_s, memory.total))
            self.limit = memory.limit


def mixed_s(points: Iterable[Point], limit: int) -> float:
    """The fewest seconds on a line between two points where its bytes are ``limit``, or of a point
    that fits; infinity where nothing fits."""
    fits = [p for p in points if p.bytes <= limit]
    large = [p for p in points if p.bytes > limit]
    least = min((p.step_s for p in fits), default=float("inf"))
    for p in fits:
        for q in large:
            share = (limit - p.bytes) / (q.bytes - p.bytes)
            least = min(least, p.step_s + share * (q.step_s - p.step_s))
    return least


def measured(name: str) -> dict[str, Any]:
    case, seen = CASES[name], Seen()
    captured, cluster = capture(case.workload), case.cluster()
    free = plan_captured(captured, case.workload, cluster, name, {}).plan
    with seen.watching():
        plan_captured(captured, case.workload, cluster, name, {"pp": "1"})
    alike, mixed = float("inf"), float("inf")
    for points in seen.points.values():
        alike = min([alike, *(p.step_s for p in points if p.bytes <= seen.limit)])
        mixed = min(mixed, mixed_s(points, seen.limit))
    searched = free.prediction.step_time_s
    return {
        "case": name,
        "stages": max(1, len(free.stages)),
        "plans": sum(map(len, seen.points.values())),
        "searched_s": searched,
        "alike_s": alike,
        "mixed_s": mixed,
        "gain": max(0.0, 1 - mixed / searched),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    gc.set_threshold(*SELDOM)
    rows = []
    for name in given.only.split(","):
        rows.append(measured(name))
        print(f"{name}: {rows[-1]['gain']:.3f}", file=sys.stderr)
    targets = [Target(f"{r['case']}: gain at most", r["gain"], WORTH) for r in rows]
    show(rows, targets, given.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
