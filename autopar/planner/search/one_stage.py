"""Plans of one stage: every state sharding of a solved candidate, tried on its solution.

Where none fits, the problem is solved again under the memory that is left, and the winner once more
at the exposed share of traffic that its price showed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.nouns.recompute import COMPUTE, FULL, KEEP_ALL, SELECTIVE, Recompute, policies
from autopar.planner.ask.candidates import StateLayout, layouts, offloaded
from autopar.planner.ask.question import Answer, Question
from autopar.planner.problem.posed import Posed, least_used
from autopar.planner.problem.solving import Solver
from autopar.planner.search.prospects import CLOSE
from autopar.planner.solve.solved import Charged, Solved, charge, solve, state_of
from autopar.planner.solve.standings import Standings, Steps, drop, offers, order
from autopar.planner.staged.lightening import lightest
from autopar.pricing.memory import held_of_state, overhead
from autopar.pricing.offload import streamed_s
from autopar.pricing.priced import price

REFINEMENTS = 3
"""Rounds of search and simulation until the exposed share of traffic settles."""
SLOWED = 1.1
"""Times what a candidate promises, what it must take as it fits for a leaner sharding."""
AGREED = 0.01
"""Difference of exposed shares that counts as settled."""


@dataclass(frozen=True, slots=True)
class OneStage:
    """What is asked and who solves it."""

    question: Question
    solver: Solver

    def answers(self, solved: Solved, now: Standings) -> list[Answer]:
        """Every state sharding of a solved candidate, by simulation. Beside a plan that fits, those
        whose state alone is too large, whatever splits the ops, are left out."""
        pins, framework = self.question.pins, self.question.framework
        candidate = solved.candidate
        listed = [*layouts(candidate.data, pins, policies(framework), candidate.model)]
        if now.compares:
            listed = self._with_room(solved, listed)
        every = [self._answer(solved, layout) for layout in listed]
        if pins.recompute is None and framework == "torch":
            every += self._lightened(solved, every)
        return every

    def _with_room(self, solved: Solved, listed: Sequence[StateLayout]) -> list[StateLayout]:
        """Layouts whose state may fit; where none may, those that hold least of it."""
        device = self.question.cluster.device
        share, process = overhead(solved.summary.packages, device)
        room = (CLOSE * device.memory_bytes - process) / (1 + share)
        held: dict[StateLayout, float] = {}
        for layout in listed:
            plain = replace(layout, recompute=KEEP_ALL)
            if plain not in held:
                state = state_of(self.question, plain, solved.candidate)
                parameters, gradients, optimizer, _ = held_of_state(solved.summary, state)
                stays = parameters + gradients + optimizer * (not self.question.offloads)
                held[plain] = solved.least.state * stays
        room = max(room, min(held.values()))
        return [one for one in listed if held[replace(one, recompute=KEEP_ALL)] <= room]

    def tried(self, solved: Solved, answers: Sequence[Answer], now: Standings) -> Steps:
        """Offers ``answers``. Where the fastest does not fit, it is squeezed, and what may then be
        faster than the best plan has the optimizer's state offloaded."""
        now = yield from offers(now, answers)
        if _fits(min(answers, key=order)):
            return now
        now = yield from self._squeeze_faster(solved, answers, now)
        relieved: list[Answer] = []
        for answer in answers if self.question.offloads else ():
            if self._relieves(solved, answer, now):
                relieved.append(self._answer(solved, offloaded(answer.decided.layout)))
                now = yield from offers(now, relieved[-1:])
        now = yield from self._squeeze_faster(solved, relieved, now)
        return (yield from self._lean(solved, answers, now))

    def _lean(self, solved: Solved, answers: Sequence[Answer], now: Standings) -> Steps:
        """Where memory takes much of what a candidate promises, as by blocks that run again: solves
        it for ranks that hold nearly as little as any, and offers what is fastest then."""
        fitting = [a.priced.time.total_s for a in answers if _fits(a)]
        promised = min(fitting, default=float("inf")) > SLOWED * solved.bound_s
        limit = solved.lean_limit
        if not promised or limit is None or not self._would_fit(solved, answers, now):
            return now
        lean = solve(self.question, solved.candidate, self.solver, None, limit, solved.posed)
        if lean is None or lean.bound_s >= now.best_s:
            return now
        return (yield from offers(now, self.answers(lean, now)))

    def _lightened(self, solved: Solved, answers: Sequence[Answer]) -> list[Answer]:
        """What fits where all blocks recompute and not where they keep products, with as few blocks
        that recompute as memory asks for."""
        fits = {answer.decided.layout: _fits(answer) for answer in answers}
        device, made = self.question.cluster.device, []
        for layout, fitting in fits.items():
            heavy, lighter = layout.recompute, replace(layout, recompute=Recompute(SELECTIVE))
            if fitting and heavy.policy in (COMPUTE, FULL) and not fits[lighter]:
                state = state_of(self.question, layout, solved.candidate)
                recompute = lightest(solved.summary, state, heavy.policy, device)
                if recompute != heavy:
                    made.append(self._answer(solved, replace(layout, recompute=recompute)))
        return made

    def _squeeze_faster(self, solved: Solved, answers: Sequence[Answer], now: Standings) -> Steps:
        """Of each recomputation that does not fit and would be faster than the best plan, offers
        the tightest layout squeezed: other shardings may take less time than to recompute more."""
        tightest: dict[Recompute, Answer] = {}
        for answer in sorted(answers, key=_needed):
            tightest.setdefault(answer.decided.layout.recompute, answer)
        for answer in tightest.values():
            if not _fits(answer) and answer.priced.time.total_s < now.best_s:
                now = yield from offers(now, self._squeeze(solved, answer))
        return now

    def _relieves(self, solved: Solved, answer: Answer, now: Standings) -> bool:
        """Whether an answer that does not fit may be faster than the best plan with the optimizer's
        state in host memory: that never takes less time, and frees no more than that state and what
        other shardings do."""
        memory, device = answer.priced.memory, self.question.cluster.device
        share, _ = overhead(solved.summary.packages, device)
        late_s = streamed_s(device, memory.optimizer, self.question.optimizer)
        freed = (1 + share) * (memory.optimizer + solved.squeezable)
        hopeless = memory.total - freed > memory.limit
        if memory.fits or (hopeless and now.compares):
            return False
        return answer.priced.time.total_s + late_s < now.best_s

    def _would_fit(self, solved: Solved, answers: Sequence[Answer], now: Standings) -> bool:
        """Whether one that would be faster than the best plan fits without what other shardings may
        free."""
        share, _ = overhead(solved.summary.packages, self.question.cluster.device)
        freed = (1 + share) * solved.squeezable
        faster = (a.priced.memory for a in answers if a.priced.time.total_s < now.best_s)
        return any(not m.fits and m.total - freed <= m.limit for m in faster)

    def _squeeze(self, solved: Solved, tightest: Answer) -> list[Answer]:
        """Solves again with a price on memory, so that the tightest layout may fit after all."""
        charged, memory = Charged(tightest.decided.layout, 1.0), tightest.priced.memory
        over = memory.total - memory.limit
        if over > memory.activations or over <= 0:  # or the host's memory is what is short
            return []
        candidate, posed = solved.candidate, solved.posed
        problem = charge(self.question, candidate, posed, charged).problem
        held, least = problem.peak(solved.solution.choice), least_used(problem)
        for share in (1.05, 1.5, 2.5):
            limit = int(held - share * over)
            if limit < least:
                break
            again = solve(self.question, candidate, self.solver, charged, limit, posed)
            if again is None:
                break
            answer = self._answer(again, charged.layout)
            if _fits(answer):
                return [answer]
        return []

    def _answer(self, solved: Solved, layout: StateLayout) -> Answer:
        state = state_of(self.question, layout, solved.candidate)
        priced = price(solved.model, state, layout.recompute)
        return Answer(solved.decided(solved.candidate, layout), priced)

    def refined(self, best: Answer, now: Standings) -> Standings:
        """``now`` with ``best`` solved again: data traffic at what its price left exposed, until
        objective and time agree."""
        candidate, layout = best.decided.candidate, best.decided.layout
        posed: Posed | None = None
        exposed = best.priced.time.exposed_share
        for _ in range(REFINEMENTS):
            charged = Charged(layout, exposed)
            solved = solve(self.question, candidate, self.solver, charged, posed=posed)
            if solved is None:
                break
            posed = solved.posed
            again = self._answer(solved, layout)
            if _fits(again) and again.priced.time.total_s <= best.priced.time.total_s:
                if now.alarms.on(again):
                    now = drop(now, again)
                else:
                    best = again
            exposed = again.priced.time.exposed_share
            if abs(exposed - charged.exposed) < AGREED:
                break
        return replace(now, best=best)


def _fits(answer: Answer) -> bool:
    return answer.priced.memory.fits


def _needed(answer: Answer) -> int:
    return answer.priced.memory.total
