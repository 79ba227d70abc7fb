"""The best layout so far, what lost and why, and how far from fitting the others are."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost_models.physics import Impossible
from autopar.nouns.axes import PIPELINE
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import DoesNotFit
from autopar.nouns.layout import LayoutError
from autopar.nouns.mesh import Mesh
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.plan import RunnerUp
from autopar.nouns.recompute import POLICIES
from autopar.nouns.text.cluster import devices_text
from autopar.planner.ask.candidates import Candidate
from autopar.planner.ask.question import Answer, Decided, Outcome, Question
from autopar.planner.ask.sentences import layout_text, short_text, size_text
from autopar.planner.solve.alarms import Alarms, sentences

RUNNERS_UP = 6
NOTABLE = 0.01
"""A difference of memory, as a share, that is worth a word."""

Family = tuple[int, Mesh, int, str, str]
"""(pp, tp, ZeRO level, recompute, offload): of each family the best loser is told."""


@dataclass(frozen=True, slots=True)
class Standings:
    """What a search has seen so far; each step of it gives the next.

    worth_s: seconds that the best must take less than.
    tried:   candidates, and shapes of pipelines, that were looked at.
    bound_s: no plan that is looked at takes less.
    refused: why the first pipeline that could not be could not.
    dropped: layouts by what of their figures cannot be.
    """

    alarms: Alarms
    worth_s: float = float("inf")
    best: Answer | None = None
    tightest: Answer | None = None
    tried: int = 0
    bound_s: float = float("inf")
    refused: str = ""
    dropped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lost: Mapping[Family, RunnerUp] = field(default_factory=dict)
    too_big: Mapping[Family, RunnerUp] = field(default_factory=dict)
    beaten: Mapping[tuple[int, Mesh], RunnerUp] = field(default_factory=dict)

    @property
    def best_s(self) -> float:
        """Seconds of a step of the best so far; what is to be beaten."""
        return self.worth_s if self.best is None else self.best.priced.time.total_s

    @property
    def compares(self) -> bool:
        """Whether there is anything to beat."""
        return self.best_s < float("inf")

    def runners_up(self, winner: Answer) -> tuple[RunnerUp, ...]:
        """The best of each family that lost, with why: first what fits, each part fastest first."""
        own = family(winner.decided)
        lost = {f: r for f, r in self.lost.items() if f != own}
        fits = [replace(r, reason=_behind(r, winner)) for r in lost.values()]
        big = [r for f, r in self.too_big.items() if f not in lost and f != own]
        seen = {f[:2] for f in (*self.lost, *self.too_big, own)}
        beaten = [r for degrees, r in self.beaten.items() if degrees not in seen]
        shown = [r for part in (fits, beaten, big) for r in sorted(part, key=_seconds)]
        first = shown[:RUNNERS_UP]
        # Whether the model is cut into stages is told even where others came closer.
        piped = {PIPELINE in r.degrees for r in first} | {winner.decided.pp > 1}
        other = next((r for r in shown[RUNNERS_UP:] if (PIPELINE in r.degrees) not in piped), None)
        return tuple(first if other is None else [*first[:-1], other])


Steps = Generator[Standings, None, Standings]
"""A search: the standings after each step, the last ones also as its value. Whoever stops it has
the best so far."""


def offer(now: Standings, answer: Answer) -> Standings:
    """Ranks an answer: the best, a loser, or one that does not fit; none that cannot be."""
    if now.alarms.on(answer):
        return drop(now, answer)
    if not answer.priced.memory.fits:
        return _does_not_fit(now, answer)
    if now.best is None:
        faster = answer.priced.time.total_s < now.worth_s
        return replace(now, best=answer) if faster else lose(now, answer)
    if order(answer) < order(now.best):
        return lose(replace(now, best=answer), now.best)
    return lose(now, answer)


def offers(now: Standings, answers: Iterable[Answer]) -> Steps:
    """One after the other."""
    for answer in answers:
        now = offer(now, answer)
        yield now
    return now


def drop(now: Standings, answer: Answer) -> Standings:
    """Remembers an answer whose figures cannot be."""
    alarm = now.alarms.on(answer)
    layouts = (*now.dropped.get(alarm, ()), layout_text(answer.decided))
    return replace(now, dropped={**now.dropped, alarm: layouts})


def lose(now: Standings, answer: Answer) -> Standings:
    """Remembers an answer that fits and is not the best."""
    return replace(now, lost=_with(now.lost, answer, "", _seconds))


def _does_not_fit(now: Standings, answer: Answer) -> Standings:
    memory = answer.priced.memory
    if now.tightest is None or memory.total < now.tightest.priced.memory.total:
        now = replace(now, tightest=answer)
    why = f"does not fit by {short_text(memory)}"
    return replace(now, too_big=_with(now.too_big, answer, why, lambda lost: lost.memory_bytes))


def _with(
    known: Mapping[Family, RunnerUp],
    answer: Answer,
    why: str,
    figure: Callable[[RunnerUp], float],
) -> Mapping[Family, RunnerUp]:
    """``known``, with ``answer`` where its figure is the least of its family."""
    of, lost = family(answer.decided), _runner_up(answer, why)
    return known if of in known and figure(lost) >= figure(known[of]) else {**known, of: lost}


def beat(now: Standings, candidate: Candidate, bound_s: float, pp: int = 1) -> Standings:
    """Remembers a candidate that no layout can save."""
    piped, of = {PIPELINE: pp} if pp > 1 else {}, (pp, candidate.model)
    lost = RunnerUp(
        degrees={"dp": candidate.data, **candidate.model.degrees, **piped},
        zero=None,
        recompute=None,
        microbatches=candidate.microbatches,
        step_time_s=bound_s,
        memory_bytes=0,
        reason="cannot win: the time is its lower bound, all data traffic hidden",
    )
    return replace(now, beaten={**now.beaten, of: now.beaten.get(of, lost)})


def refuse(now: Standings, why: object) -> Standings:
    """Remembers why a pipeline cannot be."""
    return replace(now, refused=now.refused or str(why))


def compared(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest of searches over several clusters, with what others could do; the first of
    equals."""
    first = min(outcomes, key=lambda outcome: round(outcome.best.priced.time.total_s, 12))
    others: dict[tuple[tuple[str, int], ...], RunnerUp] = {}
    for other in sorted(outcomes, key=lambda outcome: outcome.best.priced.time.total_s):
        if other is not first:
            named = tuple((group.device.name, group.count) for group in other.cluster.groups)
            reason = _behind(_runner_up(other.best, ""), first.best)
            where = devices_text(other.cluster.groups)
            others.setdefault(named, _runner_up(other.best, f"ranks of {where}: {reason}"))
    shown = (*others.values(), *first.runners_up)
    return replace(
        first,
        lower_bound_s=min(outcome.lower_bound_s for outcome in outcomes),
        runners_up=shown[: max(RUNNERS_UP, len(others))],
        tried=sum(outcome.tried for outcome in outcomes),
        alarms=tuple(dict.fromkeys(line for one in outcomes for line in one.alarms)),
    )


def family(decided: Decided) -> Family:
    layout = decided.layout
    return decided.pp, decided.candidate.model, layout.zero, layout.recompute.policy, layout.offload


def order(answer: Answer) -> tuple[float, int, int, int, int, int]:
    """Fastest first; between equals, the one that cuts, shards, recomputes and offloads least."""
    layout = answer.decided.layout
    seconds, again = round(answer.priced.time.total_s, 12), POLICIES.index(layout.recompute.policy)
    off = OFFLOAD.index(layout.offload)
    return seconds, answer.decided.pp, again, off, layout.zero, layout.dp_shard


def _seconds(lost: RunnerUp) -> float:
    return lost.step_time_s


def _behind(lost: RunnerUp, winner: Answer) -> str:
    """Why a plan that fits lost: its time, what it does more of in the same, and its memory."""
    return _slower(lost, winner) + _memory(lost.memory_bytes / winner.priced.memory.total - 1)


def _slower(lost: RunnerUp, winner: Answer) -> str:
    slower = lost.step_time_s / winner.priced.time.total_s - 1
    if slower >= 5e-4:
        return f"{slower:.1%} slower"
    if slower >= 1e-5:
        return f"{slower:.3%} slower"
    won = winner.decided.layout
    if PIPELINE in lost.degrees and winner.decided.pp == 1:
        return "as fast; is cut into stages"
    if lost.recompute != won.recompute:
        more = f"recomputes {lost.recompute}"
    elif lost.offload != won.offload:
        more = "offloads the optimizer's state"
    elif lost.zero != won.zero:
        more = f"ZeRO {lost.zero} splits {'more' if (lost.zero or 0) > won.zero else 'less'}"
    else:
        more = "other degrees"
    return f"as fast; {more}"


def _memory(more: float) -> str:
    """The other half of the trade, where it is worth telling; ``more`` is a share."""
    if abs(more) < NOTABLE:
        return ""
    return f", {abs(more):.0%} {'more memory' if more > 0 else 'less memory, but both fit'}"


def _runner_up(answer: Answer, reason: str) -> RunnerUp:
    decided, layout = answer.decided, answer.decided.layout
    return RunnerUp(
        degrees={
            **decided.spread.mesh.degrees,
            **({PIPELINE: decided.pp} if decided.pp > 1 else {}),
        },
        zero=layout.zero,
        recompute=layout.recompute,
        microbatches=decided.candidate.microbatches,
        step_time_s=answer.priced.time.total_s,
        memory_bytes=answer.priced.memory.total,
        reason=reason,
        offload=layout.offload,
    )


class NothingFits(DoesNotFit):
    """What is short, and by how much; ``tightest`` is the layout that needs least."""

    def __init__(self, text: str, tightest: Answer | None) -> None:
        super().__init__(text)
        self.tightest = tightest


class NothingFaster(NothingFits):
    """No plan is worth it: any takes as long as `Question.worth_s`, or does not fit."""


def no_plan(question: Question, now: Standings, candidates: int) -> Exception:
    """The error to raise where there is none."""
    if question.worth_s < float("inf"):
        return NothingFaster(f"no plan takes less than {question.worth_s:.4g} s", now.tightest)
    for line in sentences(now.dropped):
        return Impossible(f"internal error: no layout is left. {line}")
    pp = question.pins.pp or 1
    if pp > 1 and now.tightest is None:
        return LayoutError(
            f"--fix pp={pp}: {now.refused or 'the model cannot be split so'}"
            "; take fewer ranks, or less of interleave"
        )
    if question.travels and now.tightest is None:
        return LayoutError(
            f"--fix {question.travels} has tokens travel to experts along one axis, and of the "
            f"{candidates} layouts that the other pins allow none has one whose ranks have tokens "
            "of their own to send; leave it out, or let ep borrow ranks of dp_shard or cp"
        )
    return _too_big(now, question.cluster, candidates)


def _too_big(now: Standings, cluster: Cluster, candidates: int) -> NothingFits:
    """The error where nothing fits: the tightest layout with its memory, part by part."""
    answer = now.tightest
    if answer is None:
        return NothingFits(
            f"none of {candidates} candidates can cut this model over {cluster.device_count} "
            "devices; name a layout with --fix to learn what stands against it.",
            None,
        )
    memory = answer.priced.memory
    shares = memory.parts()
    most = max(shares, key=lambda n: shares[n])
    listed = ", ".join(f"{name} {size_text(size)}" for name, size in shares.items())
    names = " and ".join(dict.fromkeys(kind.device.name for kind in cluster.kinds))
    needs = f"The tightest layout ({layout_text(answer.decided)}) needs {size_text(memory.total)}"
    if memory.total <= memory.limit:
        return NothingFits(
            f"nothing fits the hosts of {names}. {needs} of {size_text(memory.limit)}, and its "
            f"optimizer state {size_text(memory.host)} of host memory, "
            f"{size_text(memory.host - memory.host_limit)} more than may be pinned for a device: "
            "if hosts have more, give `host: {memory: ...}` in the group of the cluster file.",
            answer,
        )
    return NothingFits(
        f"nothing fits {names} with {size_text(memory.limit)}. {needs}, "
        f"{short_text(memory)} too much: {listed}. Most of it is {most}.",
        answer,
    )
