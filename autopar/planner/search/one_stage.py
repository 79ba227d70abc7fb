"""Plans of one stage: every state sharding of a solved candidate, tried on its solution.

Where none fits, the problem is solved again under the memory that is left, and the winner once more
at the exposed share of traffic that its price showed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.nouns.recompute import COMPUTE, FULL, SELECTIVE, Recompute, policies
from autopar.planner.ask.candidates import Candidate, StateLayout, layouts, offloaded
from autopar.planner.ask.question import Answer, Question, Sharded
from autopar.planner.problem.solving import Solver
from autopar.planner.solve.solved import Solved, lowered_of, solve, state_of
from autopar.planner.solve.standings import Standings, order
from autopar.planner.staged.lightening import lightest
from autopar.pricing.memory import overhead
from autopar.pricing.offload import streamed_s
from autopar.pricing.priced import price

REFINEMENTS = 3
"""Rounds of search and simulation until the exposed share of traffic settles."""
AGREED = 0.01
"""Difference of exposed shares that counts as settled."""


@dataclass(frozen=True, slots=True)
class OneStage:
    """What is asked, who solves it, and what it is offered to."""

    question: Question
    solver: Solver
    standings: Standings

    def try_family(self, first: Solved, family: list[Candidate]) -> int:
        """Adds microbatches until memory does not bind or the bound loses; returns how many."""
        for tried, candidate in enumerate(family):
            again = candidate != first.candidate
            solved = solve(self.question, candidate, self.solver) if again else first
            if solved is None:
                continue
            if self.standings.beats(solved.bound_s):
                self.standings.beaten_by_bound(candidate, solved.bound_s)
                return tried
            self.solver.tell(f"{candidate.name}: bound {solved.bound_s * 1e3:.4g} ms")
            enough = self.try_layouts(solved)
            self.solver.check()
            if enough:
                return tried + 1
        return len(family)

    def try_layouts(self, solved: Solved) -> bool:
        """Every state sharding of a solved candidate, by simulation; squeezes where none fits.

        True where memory did not bind: the fastest layout fits, so more microbatches cannot help.
        """
        question = self.question
        answers = [
            self._answer(solved, layout)
            for layout in layouts(
                solved.candidate.data,
                self.question.pins,
                policies(self.question.framework),
                solved.candidate.model,
            )
        ]
        if question.pins.recompute is None and question.framework == "torch":
            answers += self._lightened(solved, answers)
        for answer in answers:
            self.standings.offer(answer)
        fit = any(answer.memory.fits for answer in answers)
        if fit and min(answers, key=order).memory.fits:
            return True
        if fit:
            self._squeeze_faster(solved, answers)
        fit = fit or self._squeezed(solved, answers)
        if question.offloads:
            relieved = self._offloaded(solved, answers)
            if not (fit or any(answer.memory.fits for answer in relieved)):
                self._squeezed(solved, relieved)
        return False

    def _lightened(self, solved: Solved, answers: Sequence[Answer]) -> list[Answer]:
        """What fits where all blocks recompute and not where they keep products, with as few blocks
        that recompute as memory asks for."""
        fits = {answer.layout: answer.memory.fits for answer in answers}
        device, made = self.question.cluster.device, []
        for layout, fitting in fits.items():
            heavy, lighter = layout.recompute, replace(layout, recompute=Recompute(SELECTIVE))
            if fitting and heavy.policy in (COMPUTE, FULL) and not fits[lighter]:
                state = state_of(self.question, layout, solved.candidate)
                recompute = lightest(solved.summary, state, heavy.policy, device)
                if recompute != heavy:
                    made.append(self._answer(solved, replace(layout, recompute=recompute)))
        return made

    def _squeeze_faster(self, solved: Solved, answers: Sequence[Answer]) -> None:
        """Of each recomputation that does not fit and would be faster than the best plan, offers
        the tightest layout squeezed: other shardings may take less time than to recompute more."""
        tightest: dict[Recompute, Answer] = {}
        for answer in sorted(answers, key=lambda a: a.memory.total):
            tightest.setdefault(answer.layout.recompute, answer)
        for answer in tightest.values():
            if not answer.memory.fits and not self.standings.beats(answer.time.total_s):
                squeezed = self._squeeze(solved, answer)
                if squeezed is not None:
                    self.standings.offer(squeezed)

    def _squeezed(self, solved: Solved, answers: Sequence[Answer]) -> bool:
        """Offers the tightest of ``answers`` squeezed; whether that fits."""
        for tightest in sorted(answers, key=lambda a: a.memory.total)[:1]:
            squeezed = self._squeeze(solved, tightest)
            if squeezed is not None:
                self.standings.offer(squeezed)
                return True
        return False

    def _offloaded(self, solved: Solved, answers: Sequence[Answer]) -> list[Answer]:
        """What does not fit and would be faster than the best plan, with the optimizer's state in
        host memory: that never takes less time, and frees no more than that state. Offers all."""
        device, made = self.question.cluster.device, []
        share, _ = overhead(solved.summary.packages, device)
        for answer in answers:
            memory = answer.memory
            freed = (1 + share) * memory.optimizer
            late_s = streamed_s(device, memory.optimizer, self.question.optimizer)
            hopeless = memory.total - freed > memory.limit
            if memory.fits or (hopeless and self.standings.best is not None):
                continue
            if not self.standings.beats(answer.time.total_s + late_s):
                made.append(self._answer(solved, offloaded(answer.layout)))
                self.standings.offer(made[-1])
        return made

    def _squeeze(self, solved: Solved, tightest: Answer) -> Answer | None:
        """Solves again with a price on memory, so that the tightest layout may fit after all."""
        layout, memory = tightest.layout, tightest.memory
        over = memory.total - memory.limit
        if over > memory.activations or over <= 0:  # or the host's memory is what is short
            return None
        free = solve(self.question, solved.candidate, self.solver, layout, 1.0)
        if free is None:
            return None
        for share in (1.05, 1.5, 2.5):
            limit = int(free.solution.peak - share * over)
            if limit <= 0:
                return None
            again = solve(self.question, solved.candidate, self.solver, layout, 1.0, limit)
            if again is None:
                return None
            answer = self._answer(again, layout)
            if answer.memory.fits:
                return answer
        return None

    def _answer(self, solved: Solved, layout: StateLayout) -> Answer:
        state = state_of(self.question, layout, solved.candidate)
        priced = price(solved.model, state, layout.recompute)
        solution = solved.solution
        decided = Sharded(
            solved.candidate, layout, solved.spread, solved.lowered, solution, solution.cost, 0.0
        )
        return decided.priced(priced.time, priced.memory)

    def refined(self, answer: Answer) -> Answer:
        """Prices data traffic at what its price left exposed, until objective and time agree."""
        best = self.as_layout(answer)
        exposed = answer.time.exposed_share
        for _ in range(REFINEMENTS):
            solved = solve(self.question, answer.candidate, self.solver, answer.layout, exposed)
            if solved is None:
                break
            again = replace(self._answer(solved, answer.layout), exposed=exposed)
            faster = again.memory.fits and again.time.total_s <= best.time.total_s
            if faster and not self.standings.alarms.sound(again):
                best = again
            if abs(again.time.exposed_share - exposed) < AGREED:
                break
            exposed = again.time.exposed_share
        return best

    def as_layout(self, answer: Answer) -> Answer:
        """The same decisions on the mesh of the chosen layout (the search used one data axis)."""
        spread = replace(answer.spread, mesh=answer.layout.mesh(answer.candidate.model))
        lowered = lowered_of(self.question, spread, answer.candidate)
        return replace(answer, spread=spread, lowered=lowered)
