"""What more microbatches may bring, read off a candidate that has been solved with fewer.

Whatever splits a model whose microbatches are cut again splits it before that too, in larger
pieces, and takes no longer then. What is kept for backward shrinks with the pieces; model state
does not, and where it moves with each microbatch it moves more often. So of a mesh's numbers of
microbatches only those are solved whose prospect is better than the best plan. This is an
estimate, not a bound: pieces that no longer divide, or products that are faster when smaller, may
do better than their prospect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.nouns.recompute import COMPUTE, FULL, SELECTIVE, Recompute
from autopar.planner.ask.question import Answer, Question
from autopar.planner.solve.solved import Solved
from autopar.pricing.memory import overhead
from autopar.pricing.offload import streamed_s

CLOSE = 1.02
"""Memory of an estimate that may still fit, as a share of the device's."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """Of the numbers of microbatches that are multiples of ``microbatches``.

    bound_s: seconds that none takes less than.
    limit:   bytes of a device, and `CLOSE` to it.
    fixed:   bytes of model state and the like, of one layout each.
    cut:     bytes that are halved where pieces are, of the same.
    time_s:  seconds of a step, of the same.
    each_s:  seconds that state moves with every microbatch, of the same.
    mixed:   pairs of layouts: blocks of one model may be divided among the two.
    """

    microbatches: int
    bound_s: float
    limit: int
    fixed: npt.NDArray[np.float64]
    cut: npt.NDArray[np.float64]
    time_s: npt.NDArray[np.float64]
    each_s: npt.NDArray[np.float64]
    mixed: npt.NDArray[np.int64]

    def step_s(self, microbatches: int) -> float:
        """Seconds of the fastest layout that may fit then; infinite: none may."""
        if microbatches % self.microbatches:
            return 0.0
        held = self.fixed + self.cut * (self.microbatches / microbatches)
        time_s = np.maximum(self.time_s, self.each_s * microbatches)
        fitting = time_s[held <= self.limit]
        fastest = float(fitting.min(initial=np.inf))
        a, b = self.mixed.T
        room, more, less = self.limit - held[b], held[a] - held[b], time_s[a] - time_s[b]
        part = (room >= 0) & (more > room)
        between = time_s[b][part] + less[part] * room[part] / more[part]
        return max(self.bound_s, min(fastest, float(between.min(initial=np.inf))))


def prospect(question: Question, solved: Solved, answers: Sequence[Answer]) -> Prospect:
    """``answers``: of all layouts of the candidate; none, where its bound has lost."""
    ways = [_ways(question, solved, answer) for answer in answers]
    layouts = [answer.decided.layout for answer in answers]
    place = {layout: n for n, layout in enumerate(layouts)}
    pairs = [
        (place[lighter], place[layout])
        for layout in layouts
        if layout.recompute in (Recompute(COMPUTE), Recompute(FULL))
        and (lighter := replace(layout, recompute=Recompute(SELECTIVE))) in place
    ]
    listed = [way for alike in zip(*ways, strict=True) for way in alike]  # as priced first
    fixed, cut, time_s, each_s = np.array(listed, np.float64).reshape(-1, 4).T
    return Prospect(
        solved.candidate.microbatches,
        solved.bound_s,
        int(CLOSE * question.cluster.device.memory_bytes),
        fixed,
        cut,
        time_s,
        each_s,
        np.array(pairs, np.int64).reshape(-1, 2),
    )


def _ways(
    question: Question, solved: Solved, answer: Answer
) -> list[tuple[float, float, float, float]]:
    """(fixed bytes, bytes that are cut, seconds, and those of state for each microbatch): as
    priced; and, as if it took no time, with the shardings that need least, of whose state as much
    less moves; either also with the optimizer's state in host memory."""
    device, memory, least = question.cluster.device, answer.priced.memory, solved.least
    share, _ = overhead(solved.summary.packages, device)
    cut, time_s = (1 + share) * memory.activations, answer.priced.time.total_s
    fixed, each_s = memory.total - cut, answer.priced.time.moved_each_s
    kept = least.again if answer.decided.layout.recompute.runs_again else least.kept
    ways: list[tuple[float, float, float, float]] = []
    for a, b in ((1.0, 1.0), (least.state, kept)):
        ways.append((a * fixed, b * cut, time_s, a * each_s))
        if question.offloads:
            late_s = time_s + streamed_s(device, memory.optimizer, question.optimizer)
            rest = fixed - (1 + share) * memory.optimizer
            ways.append((a * rest, b * cut, late_s, a * each_s))
    return ways
