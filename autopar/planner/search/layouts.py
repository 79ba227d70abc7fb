"""The search over layouts: mesh, sharding of every op, state sharding, recompute, accumulation.

For each mesh of model axes and number of microbatches the sharding of all ops is one `Problem`,
solved with its data traffic taken as hidden; that optimum bounds every layout of the candidate from
below. Candidates run in the order of a cheap bound. State shardings are then tried on the
solution by simulation; where none fits, the problem is solved again under the memory that is left,
and the winner once more at the exposed share of traffic that its simulation showed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.layout import LayoutError, divisors
from autopar.nouns.mesh import Mesh
from autopar.nouns.recompute import COMPUTE, FULL, SELECTIVE, Recompute, policies
from autopar.nouns.text.cluster import devices_text
from autopar.planner.ask.candidates import Candidate, StateLayout, candidates, layouts, offloaded
from autopar.planner.ask.question import Answer, Outcome, Question, Sharded
from autopar.planner.ask.selections import orders, parts
from autopar.planner.problem.solving import Solver
from autopar.planner.solve.alarms import Alarms
from autopar.planner.solve.solved import Solved, lowered_of, solve, state_of
from autopar.planner.solve.standings import Standings, compared, order, too_big
from autopar.planner.staged.lightening import lightest
from autopar.planner.staged.pipelines import Pipelines
from autopar.pricing.memory import overhead
from autopar.pricing.offload import streamed_s
from autopar.pricing.priced import price
from autopar.pricing.utilization import cluster_peak_s

AS_FAST = 1.01
"""Step times this close are equal to a reader; the model's own error is larger. Between such, a
plan of one stage is taken."""
REFINEMENTS = 3
"""Rounds of search and simulation until the exposed share of traffic settles."""
AGREED = 0.01
"""Difference of exposed shares that counts as settled."""


Progress = Callable[[str], None]


def search_plan(question: Question, progress: Progress = lambda _: None) -> Outcome:
    """The fastest layout that fits; where devices differ, of all parts of the cluster that are
    worth a search, then of the best one's groups in other orders.

    Raises:
        NothingFits: nothing does; says what is short and by how much.
        LayoutError: the batch, the pinned degrees and the devices do not divide.
    """
    if len(question.cluster.kinds) == 1:
        return _search(question, progress)
    outcomes: list[Outcome] = []
    refused: list[UserError] = []

    def tried(cluster: Cluster) -> bool:
        """False: the user has stopped the search."""
        best_s = min((outcome.best.time.total_s for outcome in outcomes), default=float("inf"))
        if cluster_peak_s(question.graph, cluster) >= best_s:
            return True
        devices = devices_text(cluster.groups)
        progress(f"searching layouts of {devices}")
        try:
            outcomes.append(_search(replace(question, cluster=cluster), progress))
        except UserError as error:
            refused.append(error)
            progress(f"{devices}: {error}")
            return True
        except KeyboardInterrupt:
            if not outcomes:
                raise
            return False
        return outcomes[-1].lower_bound_s > 0

    going = all(map(tried, parts(question.cluster)))
    if going and outcomes and compared(outcomes).best.stages:
        going = all(map(tried, orders(compared(outcomes).cluster)))
    if going and all(outcome.cluster.idle for outcome in outcomes):
        all(map(tried, orders(question.cluster)))  # all devices fit in another order, maybe
    if not outcomes:
        raise refused[0]
    return compared(outcomes)


def _search(question: Question, progress: Progress) -> Outcome:
    if (question.pins.pp or 1) > 1:
        return _search_pinned(question, progress)
    solver = Solver(question.searcher, progress, question.verbose)
    standings = Standings(Alarms.of(question))
    devices = question.cluster.device_count
    listed = question.legal(candidates(devices, question.batch, question.pins))
    families = _by_degree(listed)
    firsts: list[Solved] = []
    tried = 0
    try:
        for family in families.values():
            first = solve(question, family[0], solver)
            if first is not None:
                firsts.append(first)
            solver.check()
        firsts.sort(key=lambda s: s.bound_s)
        # Ranks that all do the same are for where nothing else fits.
        repeating = [first for first in firsts if first.repeats]
        for group in ([first for first in firsts if not first.repeats], repeating):
            for first in group:
                family = families[first.candidate.model]
                tried += _try_family(question, first, family, standings, solver)
            if standings.best is not None:
                break
        best = (
            _refine(question, standings.best, standings, solver)
            if standings.best is not None
            else None
        )
        lower_bound_s = min(first.bound_s for first in firsts) if firsts else float("inf")
        degrees = _pipeline_degrees(question)
        if degrees:
            standings.best = best
            pipelines = Pipelines(question, solver, standings)
            pipelines.search(degrees, firsts)
            tried += pipelines.tried
            lower_bound_s = min(lower_bound_s, pipelines.bound_s)
            if standings.best is not None and standings.best.stages:
                cut = pipelines.settled(standings.best)
                if standings.alarms.sound(cut):
                    pass
                elif best is None or cut.time.total_s * AS_FAST < best.time.total_s:
                    best = cut
                else:
                    standings.lose(cut)
        if best is None:
            standings.alarms.raise_first()
            raise too_big(standings, question.cluster, len(listed))
        lower_bound_s = min(lower_bound_s, best.time.total_s)
    except KeyboardInterrupt:
        best = _best_so_far(question, firsts, standings, solver)
        lower_bound_s = 0.0  # what has not been looked at could be anything
    return Outcome(
        best=best,
        lower_bound_s=lower_bound_s,
        runners_up=standings.runners_up(best),
        tried=tried,
        cluster=question.cluster,
        alarms=standings.alarms.lines,
    )


def _pipeline_degrees(question: Question) -> list[int]:
    """Numbers of pipeline ranks beside 1 that may be tried where none is pinned."""
    if question.pins.pp is not None or question.framework == "jax":
        return []
    return divisors(question.cluster.device_count)[1:]


def _search_pinned(question: Question, progress: Progress) -> Outcome:
    """The fastest plan of ``question.pins.pp`` pipeline ranks."""
    pp, devices = question.pins.pp or 1, question.cluster.device_count
    if devices % pp:
        raise LayoutError(f"--fix pp={pp} makes equal groups of devices, and there are {devices}")
    listed = question.legal(candidates(devices // pp, question.batch, question.pins))
    standings = Standings(Alarms.of(question))
    pipelines = Pipelines(
        question, Solver(question.searcher, progress, question.verbose), standings
    )
    pipelines.search([pp], [])
    if standings.best is None:
        standings.alarms.raise_first()
        if standings.tightest is None:
            raise LayoutError(
                f"--fix pp={pp}: {pipelines.refused or 'the model cannot be split so'}"
                "; take fewer ranks, or less of interleave"
            )
        raise too_big(standings, question.cluster, len(listed))
    best = pipelines.settled(standings.best)
    if standings.alarms.sound(best):
        standings.alarms.raise_first()
    return Outcome(
        best=best,
        lower_bound_s=min(pipelines.bound_s, best.time.total_s),
        runners_up=standings.runners_up(best),
        tried=pipelines.tried,
        cluster=question.cluster,
        alarms=standings.alarms.lines,
    )


def _best_so_far(
    question: Question, firsts: list[Solved], standings: Standings, solver: Solver
) -> Answer:
    """The best layout among what had been solved when the user stopped the search."""
    for first in sorted(firsts, key=lambda s: s.solution.cost):
        if standings.best is not None:
            break
        _try_layouts(question, first, standings, solver)
    if standings.best is None:
        raise KeyboardInterrupt
    solver.tell("stopped: this is the best layout so far; its lower bound is not known")
    return standings.best if standings.best.stages else _as_layout(question, standings.best)


def _by_degree(listed: list[Candidate]) -> dict[Mesh, list[Candidate]]:
    """Candidates by their mesh of model axes, fewest microbatches first."""
    families: dict[Mesh, list[Candidate]] = {}
    for candidate in listed:
        families.setdefault(candidate.model, []).append(candidate)
    return families


def _try_family(
    question: Question,
    first: Solved,
    family: list[Candidate],
    standings: Standings,
    solver: Solver,
) -> int:
    """Adds microbatches until memory does not bind or the bound loses; returns how many."""
    for tried, candidate in enumerate(family):
        again = candidate != first.candidate
        solved = solve(question, candidate, solver) if again else first
        if solved is None:
            continue
        if standings.beats(solved.bound_s):
            standings.beaten_by_bound(candidate, solved.bound_s)
            return tried
        solver.tell(f"{candidate.name}: bound {solved.bound_s * 1e3:.4g} ms")
        enough = _try_layouts(question, solved, standings, solver)
        solver.check()
        if enough:
            return tried + 1
    return len(family)


def _try_layouts(question: Question, solved: Solved, standings: Standings, solver: Solver) -> bool:
    """Every state sharding of a solved candidate, by simulation; squeezes where none fits.

    True where memory did not bind: the fastest layout fits, so more microbatches cannot help.
    """
    answers = [
        _answer(question, solved, layout)
        for layout in layouts(solved.candidate.data, question.pins, policies(question.framework))
    ]
    if question.pins.recompute is None and question.framework == "torch":
        answers += _lightened(question, solved, answers)
    for answer in answers:
        standings.offer(answer)
    fit = any(answer.memory.fits for answer in answers)
    if fit and min(answers, key=order).memory.fits:
        return True
    if fit:
        _squeeze_faster(question, solved, answers, standings, solver)
    fit = fit or _squeezed(question, solved, answers, standings, solver)
    if question.offloads:
        relieved = _offloaded(question, solved, answers, standings)
        if not (fit or any(answer.memory.fits for answer in relieved)):
            _squeezed(question, solved, relieved, standings, solver)
    return False


def _lightened(question: Question, solved: Solved, answers: Sequence[Answer]) -> list[Answer]:
    """What fits where all blocks recompute and not where they keep products, with as few blocks
    that recompute as memory asks for."""
    fits = {answer.layout: answer.memory.fits for answer in answers}
    device, made = question.cluster.device, []
    for layout, fitting in fits.items():
        heavy, lighter = layout.recompute, replace(layout, recompute=Recompute(SELECTIVE))
        if fitting and heavy.policy in (COMPUTE, FULL) and not fits[lighter]:
            state = state_of(question, layout, solved.candidate)
            recompute = lightest(solved.summary, state, heavy.policy, device)
            if recompute != heavy:
                made.append(_answer(question, solved, replace(layout, recompute=recompute)))
    return made


def _squeeze_faster(
    question: Question,
    solved: Solved,
    answers: Sequence[Answer],
    standings: Standings,
    solver: Solver,
) -> None:
    """Of each recomputation that does not fit and would be faster than the best plan, offers the
    tightest layout squeezed: other shardings may take less time than to recompute more."""
    tightest: dict[Recompute, Answer] = {}
    for answer in sorted(answers, key=lambda a: a.memory.total):
        tightest.setdefault(answer.layout.recompute, answer)
    for answer in tightest.values():
        if not answer.memory.fits and not standings.beats(answer.time.total_s):
            squeezed = _squeeze(question, solved, answer, solver)
            if squeezed is not None:
                standings.offer(squeezed)


def _squeezed(
    question: Question,
    solved: Solved,
    answers: Sequence[Answer],
    standings: Standings,
    solver: Solver,
) -> bool:
    """Offers the tightest of ``answers`` squeezed; whether that fits."""
    for tightest in sorted(answers, key=lambda a: a.memory.total)[:1]:
        squeezed = _squeeze(question, solved, tightest, solver)
        if squeezed is not None:
            standings.offer(squeezed)
            return True
    return False


def _offloaded(
    question: Question, solved: Solved, answers: Sequence[Answer], standings: Standings
) -> list[Answer]:
    """What does not fit and would be faster than the best plan, with the optimizer's state in host
    memory: that never takes less time, and frees no more than that state. Offers all of them."""
    device, made = question.cluster.device, []
    share, _ = overhead(solved.summary.packages, device)
    for answer in answers:
        memory = answer.memory
        freed = (1 + share) * memory.optimizer
        late_s = streamed_s(device, memory.optimizer, question.optimizer)
        if memory.fits or (memory.total - freed > memory.limit and standings.best is not None):
            continue
        if not standings.beats(answer.time.total_s + late_s):
            made.append(_answer(question, solved, offloaded(answer.layout)))
            standings.offer(made[-1])
    return made


def _squeeze(question: Question, solved: Solved, tightest: Answer, solver: Solver) -> Answer | None:
    """Solves again with a price on memory, so that the tightest layout may fit after all."""
    layout, memory = tightest.layout, tightest.memory
    over = memory.total - memory.limit
    if over > memory.activations or over <= 0:  # or the host's memory is what is short
        return None
    free = solve(question, solved.candidate, solver, layout, 1.0)
    if free is None:
        return None
    for share in (1.05, 1.5, 2.5):
        limit = int(free.solution.peak - share * over)
        if limit <= 0:
            return None
        again = solve(question, solved.candidate, solver, layout, 1.0, limit)
        if again is None:
            return None
        answer = _answer(question, again, layout)
        if answer.memory.fits:
            return answer
    return None


def _answer(question: Question, solved: Solved, layout: StateLayout) -> Answer:
    state = state_of(question, layout, solved.candidate)
    priced = price(solved.model, state, layout.recompute)
    solution = solved.solution
    decided = Sharded(
        solved.candidate, layout, solved.spread, solved.lowered, solution, solution.cost, 0.0
    )
    return decided.priced(priced.time, priced.memory)


def _refine(question: Question, answer: Answer, standings: Standings, solver: Solver) -> Answer:
    """Prices data traffic at what the simulation left exposed, until objective and time agree."""
    best = _as_layout(question, answer)
    exposed = answer.time.exposed_share
    for _ in range(REFINEMENTS):
        solved = solve(question, answer.candidate, solver, answer.layout, exposed)
        if solved is None:
            break
        again = replace(_answer(question, solved, answer.layout), exposed=exposed)
        faster = again.memory.fits and again.time.total_s <= best.time.total_s
        if faster and not standings.alarms.sound(again):
            best = again
        if abs(again.time.exposed_share - exposed) < AGREED:
            break
        exposed = again.time.exposed_share
    return best


def _as_layout(question: Question, answer: Answer) -> Answer:
    """The same decisions on the mesh of the chosen layout (the search used one data axis)."""
    spread = replace(answer.spread, mesh=answer.layout.mesh(answer.candidate.model))
    lowered = lowered_of(question, spread, answer.candidate)
    return replace(answer, spread=spread, lowered=lowered)
