"""The search over layouts: mesh, sharding of every op, state sharding, recompute, accumulation.

For each mesh of model axes and number of microbatches the sharding of all ops is one `Problem`,
solved with its data traffic taken as hidden; that optimum bounds every layout of the candidate from
below. Candidates run in the order of what they promise (`best_first`). State shardings are then
tried (`one_stage`), and pipelines beside them (`autopar.planner.staged.pipelines`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.nouns.axes import EXPERT, SEQUENCES
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.layout import LayoutError
from autopar.nouns.mesh import Mesh
from autopar.nouns.text.cluster import devices_text
from autopar.planner.ask.candidates import Candidate, Sharing, candidates
from autopar.planner.ask.question import Answer, Outcome, Question
from autopar.planner.ask.selections import orders, parts
from autopar.planner.problem.solving import Solver
from autopar.planner.search.best_first import SHARED, Families, try_families
from autopar.planner.search.one_stage import OneStage
from autopar.planner.solve.alarms import Alarms, sentences
from autopar.planner.solve.solved import Solved, solve
from autopar.planner.solve.standings import Standings, Steps, compared, drop, lose, no_plan
from autopar.planner.staged.in_full import settled
from autopar.planner.staged.pipelines import Pipelines
from autopar.pricing.utilization import cluster_peak_s

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
        best_s = min((one.best.priced.time.total_s for one in outcomes), default=float("inf"))
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
    if going and outcomes and compared(outcomes).best.decided.stages:
        going = all(map(tried, orders(compared(outcomes).cluster)))
    if going and all(outcome.cluster.idle for outcome in outcomes):
        all(map(tried, orders(question.cluster)))  # all devices fit in another order, maybe
    if not outcomes:
        raise refused[0]
    return compared(outcomes)


def _search(question: Question, progress: Progress) -> Outcome:
    """Of one cluster, with its groups in this order."""
    pp, devices = question.pins.pp or 1, question.cluster.device_count
    if devices % pp:
        raise LayoutError(f"--fix pp={pp} makes equal groups of devices, and there are {devices}")
    listed = _unshared(question, devices // pp)
    solver = Solver(question.searcher, progress, question.verbose)
    alone, now = OneStage(question, solver), Standings(Alarms.of(question), question.worth_s)
    families = {} if _several(question) else _by_degree(listed)
    firsts: list[Solved] = []
    try:
        for family in families.values():
            first = solve(question, family[0], solver)
            if first is not None:
                firsts.append(first)
            solver.check()
        firsts.sort(key=lambda s: s.bound_s)
        now = replace(now, bound_s=min((first.bound_s for first in firsts), default=now.bound_s))
        for step in _steps(alone, firsts, families, now):
            now = step
        if now.best is None:
            raise no_plan(question, now, len(listed))
        best, lower_bound_s = now.best, min(now.bound_s, now.best.priced.time.total_s)
    except KeyboardInterrupt:
        now = _best_so_far(alone, firsts, now)
        if now.best is None:
            raise
        solver.tell("stopped: this is the best layout so far; its lower bound is not known")
        best, lower_bound_s = now.best, 0.0  # what has not been looked at could be anything
    return Outcome(
        best=best,
        lower_bound_s=lower_bound_s,
        runners_up=now.runners_up(best),
        tried=now.tried,
        cluster=question.cluster,
        alarms=sentences(now.dropped),
    )


def _several(question: Question) -> bool:
    """Whether plans of several stages alone are asked for: slices of sequences pass these."""
    return (question.pins.pp or 1) > 1 or (question.pins.seq_slices or 1) > 1


def _unshared(question: Question, devices: int) -> list[Candidate]:
    """Candidates of a stage whose ranks share neither sequences nor experts; none where only those
    that do make up the devices. Raises `LayoutError` where there are no others either."""
    try:
        return question.legal(candidates(devices, question.batch, question.pins))
    except LayoutError as error:
        sharing = question.sharing.within(devices)
        try:
            question.legal(candidates(devices, question.batch, question.pins, sharing))
        except LayoutError:
            raise error from None
        return []


def _sharing(question: Question, families: Families) -> Families:
    """Families whose ranks share sequences or experts, beside ``families``; least first."""
    devices = question.cluster.device_count
    every = candidates(devices, question.batch, question.pins, question.sharing.within(devices))
    more = _by_degree(question.legal(every))
    least_first = sorted(more, key=lambda mesh: mesh.ways(SHARED))
    return {mesh: more[mesh] for mesh in least_first if mesh not in families}


def _shared_by(question: Question, best: Answer | None) -> Sharing:
    """What ranks of pipelines share: as in the best plan of one stage, where there is one, and
    sequences among fewer, since stages need less memory; experts among near ranks where that plan
    has them whole, since its ranks may split state for each pass, which stages do not."""
    if best is None:
        return question.sharing
    model = best.decided.candidate.model
    along, experts = model.ways(SEQUENCES), model.size(EXPERT)
    fewer = tuple(n for n in question.sharing.along if n <= along)
    near = tuple(n for n in question.sharing.experts if n <= question.sharing.near)
    return Sharing(fewer, (experts,) if experts > 1 else near, question.sharing.near)


def _steps(
    alone: OneStage,
    firsts: Sequence[Solved],
    families: Families,
    now: Standings,
) -> Steps:
    """Plans of one stage, then of several beside them. Ranks that all do the same are for where
    nothing else fits."""
    question = alone.question
    shared = {} if _several(question) else _sharing(question, families)
    for repeats in (False, True):
        if not (repeats and now.compares):
            own = {f.candidate.model: f for f in firsts if f.repeats == repeats}
            tried = {**{mesh: families[mesh] for mesh in own}, **({} if repeats else shared)}
            now = yield from try_families(alone, own, tried, now)
    if now.best is not None:
        now = alone.refined(now.best, now)
        yield now
    one_stage = now.best
    pipelines = Pipelines(question, alone.solver, _shared_by(question, one_stage))
    now = yield from pipelines.search(question.pipeline_ranks, firsts, now)
    now = _settled(question, one_stage, now)
    yield now
    return now


def _settled(question: Question, one_stage: Answer | None, now: Standings) -> Standings:
    """Where the best is a pipeline, its full price decides against that of one stage."""
    if now.best is None or not now.best.decided.stages:
        return now
    cut, back = settled(question, now.best.decided), replace(now, best=one_stage)
    if now.alarms.on(cut):
        return drop(back, cut)
    if cut.priced.time.total_s * AS_FAST < back.best_s or one_stage is None:
        return replace(now, best=cut)
    return lose(back, cut)


def _best_so_far(alone: OneStage, firsts: Sequence[Solved], now: Standings) -> Standings:
    """With the best layout among what had been solved when the user stopped the search."""
    for first in sorted(firsts, key=lambda s: s.solution.cost):
        if now.best is not None:
            break
        for step in alone.tried(first, alone.answers(first, now), now):
            now = step
    return now


def _by_degree(listed: list[Candidate]) -> dict[Mesh, list[Candidate]]:
    """Candidates by their mesh of model axes, fewest microbatches first."""
    families: dict[Mesh, list[Candidate]] = {}
    for candidate in listed:
        families.setdefault(candidate.model, []).append(candidate)
    return families
