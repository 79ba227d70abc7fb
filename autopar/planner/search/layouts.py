"""The search over layouts: mesh, sharding of every op, state sharding, recompute, accumulation.

For each mesh of model axes and number of microbatches the sharding of all ops is one `Problem`,
solved with its data traffic taken as hidden; that optimum bounds every layout of the candidate from
below. Candidates run in the order of a cheap bound. State shardings are then tried (`one_stage`),
and pipelines beside them (`autopar.planner.staged.pipelines`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.nouns.axes import EXPERT, HEADS, SEQUENCES
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.layout import LayoutError, divisors
from autopar.nouns.mesh import Mesh
from autopar.nouns.text.cluster import devices_text
from autopar.planner.ask.candidates import Candidate, Sharing, candidates
from autopar.planner.ask.question import Answer, Outcome, Question
from autopar.planner.ask.selections import orders, parts
from autopar.planner.problem.solving import Solver
from autopar.planner.search.one_stage import OneStage
from autopar.planner.solve.alarms import Alarms
from autopar.planner.solve.solved import Solved, solve
from autopar.planner.solve.standings import Standings, compared, too_big
from autopar.planner.staged.pipelines import Pipelines
from autopar.pricing.utilization import cluster_peak_s

SHARED = (EXPERT, *SEQUENCES)
AS_FAST = 1.01
"""Step times this close are equal to a reader; the model's own error is larger. Between such, a
plan of one stage is taken."""
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
    alone = OneStage(question, solver, standings)
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
                tried += alone.try_family(first, family)
            if standings.best is not None:
                break
        tried += _share(alone, firsts)
        best = None if standings.best is None else alone.refined(standings.best)
        lower_bound_s = min(first.bound_s for first in firsts) if firsts else float("inf")
        degrees = _pipeline_degrees(question)
        if degrees:
            standings.best = best
            shared = _shared_by(firsts, standings, question.sharing.near)
            pipelines = Pipelines(question, solver, standings, shared)
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
        best = _best_so_far(alone, firsts)
        lower_bound_s = 0.0  # what has not been looked at could be anything
    return Outcome(
        best=best,
        lower_bound_s=lower_bound_s,
        runners_up=standings.runners_up(best),
        tried=tried,
        cluster=question.cluster,
        alarms=standings.alarms.lines,
    )


def _share(alone: OneStage, firsts: list[Solved]) -> int:
    """Tries candidates whose ranks share sequences or experts, where they may be faster than the
    best plan; adds what was solved to ``firsts``, and returns how many were tried.

    Fewer that share, or as many with samples and experts of their own, compute as much in larger
    pieces and move less of activations, so their bound is one for these too.
    """
    question, standings, tried = alone.question, alone.standings, 0
    devices = question.cluster.device_count
    every = candidates(devices, question.batch, question.pins, question.sharing.within(devices))
    families = _by_degree(question.legal(every))
    known = {first.candidate.model: first.bound_s for first in firsts}
    for model in sorted(families, key=lambda mesh: mesh.ways(SHARED)):
        if model in known:
            continue
        less = (bound for one, bound in known.items() if _shares_less(one, model))
        if standings.beats(max(less, default=0.0)):
            continue
        solved = solve(question, families[model][0], alone.solver)
        if solved is not None:
            firsts.append(solved)
            known[model] = solved.bound_s
            tried += alone.try_family(solved, families[model])
        alone.solver.check()
    return tried


def _shares_less(one: Mesh, other: Mesh) -> bool:
    """On the same model axes, and by rows alone."""
    alike = one.without(SHARED) == other.without(SHARED) and one.size(HEADS) == 1
    ways = ((one.ways(axes), other.ways(axes)) for axes in ((EXPERT,), SEQUENCES))
    return alike and all(more % less == 0 for less, more in ways)


def _shared_by(firsts: list[Solved], standings: Standings, near: int) -> Sharing:
    """What ranks of pipelines share: as in the best plan of one stage, and where none fits all."""
    best = standings.best
    models = [best.candidate.model] if best else [first.candidate.model for first in firsts]
    along, experts = (
        tuple(sorted({model.ways(axes) for model in models} - {1}))
        for axes in (SEQUENCES, (EXPERT,))
    )
    return Sharing(along, experts, near)


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
    solver = Solver(question.searcher, progress, question.verbose)
    pipelines = Pipelines(question, solver, standings, question.sharing)
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


def _best_so_far(alone: OneStage, firsts: list[Solved]) -> Answer:
    """The best layout among what had been solved when the user stopped the search."""
    standings = alone.standings
    for first in sorted(firsts, key=lambda s: s.solution.cost):
        if standings.best is not None:
            break
        alone.try_layouts(first)
    if standings.best is None:
        raise KeyboardInterrupt
    alone.solver.tell("stopped: this is the best layout so far; its lower bound is not known")
    return standings.best if standings.best.stages else alone.as_layout(standings.best)


def _by_degree(listed: list[Candidate]) -> dict[Mesh, list[Candidate]]:
    """Candidates by their mesh of model axes, fewest microbatches first."""
    families: dict[Mesh, list[Candidate]] = {}
    for candidate in listed:
        families.setdefault(candidate.model, []).append(candidate)
    return families
