"""Bubble, memory and time of every pipeline schedule at several depths, by simulation.

    python -m benchmarks.schedules [--send 0.1] [--json]

Stages are equal; a rank's work for one microbatch is the same under every schedule. ``step`` is in
forwards of a rank's whole share; ``bubble`` the share of the ranks' time in which nothing computes;
``held`` what the fullest rank keeps for backward, in microbatches of its whole share. ``play`` is
the CPU time of making the lists, proving them and playing them once.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass

from autopar.pipeline.actions import Action
from autopar.pipeline.check import held
from autopar.pipeline.play import Costs, play
from autopar.pipeline.schedules.table import SCHEDULES, schedule
from benchmarks.figures import show

DEPTHS = ((2, 8), (4, 16), (8, 32), (16, 64), (8, 8))
"""(ranks, microbatches)"""
WORK = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@dataclass(frozen=True, slots=True)
class Row:
    schedule: str
    pp: int
    microbatches: int
    stages: int
    step: float
    bubble: float
    held: float
    play_s: float


def row(name: str, pp: int, microbatches: int, send: float) -> Row:
    """One schedule with two stages a rank where it may have several."""
    begin = time.process_time()
    made = schedule(name, pp, microbatches, 2 if SCHEDULES[name].interleaves else 1)
    # Of the model, not of stages: a part that two stages hold is one.
    parts = len(made.routes[0]) / pp

    def took(action: Action) -> float:
        return WORK[action.kind] / parts

    timeline = play(made, Costs(took, lambda a, b: send))
    spent = time.process_time() - begin
    most = max(held(made)) / parts
    return Row(
        name, pp, microbatches, len(made.ranks), timeline.step_s, timeline.bubble, most, spent
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--send", type=float, default=0.0, help="of a forward, for one send")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        row(name, pp, microbatches, options.send)
        for pp, microbatches in DEPTHS
        for name in SCHEDULES
        if microbatches >= SCHEDULES[name].least(pp)
    ]
    show([asdict(r) for r in rows], (), options.json)


if __name__ == "__main__":
    main()
