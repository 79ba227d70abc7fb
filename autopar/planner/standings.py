"""The best layout so far, what lost and why, and how far from fitting the others are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.errors import DoesNotFit
from autopar.nouns.cluster import Cluster
from autopar.nouns.plan import RunnerUp
from autopar.planner.candidates import Candidate
from autopar.planner.fixed import RECOMPUTE
from autopar.planner.question import Answer

RUNNERS_UP = 6
GB = 1e9

Family = tuple[int, int, str]
"""(tp, ZeRO level, recompute): of each family the best loser is told."""


@dataclass(slots=True)
class Standings:
    """What the search has seen."""

    best: Answer | None = None
    tightest: Answer | None = None
    _lost: dict[Family, RunnerUp] = field(default_factory=dict)
    _too_big: dict[Family, RunnerUp] = field(default_factory=dict)
    _beaten: dict[int, RunnerUp] = field(default_factory=dict)

    def beats(self, bound_s: float) -> bool:
        """The best so far is no slower than anything with this lower bound."""
        return self.best is not None and bound_s >= self.best.time.total_s

    def offer(self, answer: Answer) -> None:
        """Ranks an answer: the best, a loser, or one that does not fit."""
        if answer.memory.total > answer.memory.limit:
            self._does_not_fit(answer)
            return
        before = self.best
        if before is None or order(answer) < order(before):
            self.best, answer = answer, before or answer
        if answer is not self.best:
            known = self._lost.get(family(answer))
            if known is None or answer.time.total_s < known.step_time_s:
                self._lost[family(answer)] = _runner_up(answer, "")

    def _does_not_fit(self, answer: Answer) -> None:
        if self.tightest is None or answer.memory.total < self.tightest.memory.total:
            self.tightest = answer
        known = self._too_big.get(family(answer))
        if known is None or answer.memory.total < known.memory_bytes:
            short = (answer.memory.total - answer.memory.limit) / GB
            self._too_big[family(answer)] = _runner_up(answer, f"does not fit by {short:.1f} GB")

    def beaten_by_bound(self, candidate: Candidate, bound_s: float) -> None:
        """Remembers a candidate that no layout can save."""
        self._beaten.setdefault(
            candidate.tp,
            RunnerUp(
                degrees={"dp": candidate.data, "tp": candidate.tp},
                zero=0,
                microbatches=candidate.microbatches,
                step_time_s=bound_s,
                memory_bytes=0,
                reason="cannot win: the time is its lower bound, all data traffic hidden",
            ),
        )

    def runners_up(self, winner: Answer) -> tuple[RunnerUp, ...]:
        """The best of each family that lost, fastest first, with why."""
        lost = {f: r for f, r in self._lost.items() if f != family(winner)}
        seconds = winner.time.total_s
        told = [
            replace(r, reason=f"{r.step_time_s / seconds - 1:.1%} slower") for r in lost.values()
        ]
        told += [r for f, r in self._too_big.items() if f not in lost and f != family(winner)]
        seen = {f[0] for f in (*self._lost, *self._too_big, family(winner))}
        told += [r for tp, r in self._beaten.items() if tp not in seen]
        return tuple(sorted(told, key=lambda r: r.step_time_s)[:RUNNERS_UP])


def family(answer: Answer) -> Family:
    return answer.candidate.tp, answer.layout.zero, answer.layout.recompute


def order(answer: Answer) -> tuple[float, int, int, int]:
    """Fastest first; between equals, the one that shards and recomputes least."""
    layout = answer.layout
    seconds = round(answer.time.total_s, 12)
    return seconds, RECOMPUTE.index(layout.recompute), layout.zero, layout.dp_shard


def _runner_up(answer: Answer, reason: str) -> RunnerUp:
    return RunnerUp(
        degrees={
            "dp_replicate": answer.layout.dp_replicate,
            "dp_shard": answer.layout.dp_shard,
            "tp": answer.candidate.tp,
        },
        zero=answer.layout.zero,
        microbatches=answer.candidate.microbatches,
        step_time_s=answer.time.total_s,
        memory_bytes=answer.memory.total,
        reason=reason,
    )


def too_big(standings: Standings, cluster: Cluster, candidates: int) -> DoesNotFit:
    """The error where nothing fits: what is short, by how much, and the cheapest change."""
    answer = standings.tightest
    if answer is None:
        return DoesNotFit(
            f"none of {candidates} candidates can cut this model over {cluster.device_count} "
            "devices; name a layout with --fix to learn what stands against it"
        )
    memory, layout, candidate = answer.memory, answer.layout, answer.candidate
    shares = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        "buffers": memory.buffers,
    }
    most = max(shares, key=lambda n: shares[n])
    state = memory.parameters + memory.gradients + memory.optimizer
    ratio = memory.total / memory.limit
    if state > memory.limit / 2:
        change = (
            f"{ratio:.1f}x the devices (model state is split over all of them), or devices with "
            f"{memory.total / GB:.0f} GB"
        )
    else:
        change = f"sequences (or images) {ratio:.1f}x smaller, or {ratio:.1f}x the devices"
    listed = ", ".join(f"{name} {size / GB:.1f} GB" for name, size in shares.items())
    return DoesNotFit(
        f"nothing fits {cluster.device.name} with {memory.limit / GB:.1f} GB. The tightest layout "
        f"(dp_replicate={layout.dp_replicate}, dp_shard={layout.dp_shard}, tp={candidate.tp}, "
        f"ZeRO {layout.zero}, {candidate.microbatches} microbatches, recompute={layout.recompute}) "
        f"needs {memory.total / GB:.1f} GB, {(memory.total - memory.limit) / GB:.1f} GB too much: "
        f"{listed}. Most of it is {most}. The cheapest change that would fit: {change}."
    )
