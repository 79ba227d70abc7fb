"""The search over layouts: mesh, sharding of every op, state sharding, recompute, accumulation.

For each tensor-parallel degree and number of microbatches the sharding of all ops is one `Problem`,
solved with its data traffic taken as hidden; that optimum bounds every layout of the candidate from
below. Candidates run in the order of a cheap bound. State shardings are then tried on the
solution by simulation; where none fits, the problem is solved again under the memory that is left,
and the winner once more at the exposed share of traffic that its simulation showed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import DoesNotFit
from autopar.lowering import MICROBATCH, Lowered, lower
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import Graph
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Memory, RunnerUp, Stage
from autopar.nouns.problem import NoFeasibleAnswer, Solution
from autopar.planner.bindings import Bindings
from autopar.planner.candidates import (
    RECOMPUTE,
    Candidate,
    Fixed,
    FixError,
    Layout,
    candidates,
    layouts,
)
from autopar.planner.folding import fold
from autopar.planner.legal import NoStrategy
from autopar.planner.memory import step_memory
from autopar.planner.nodes import Folded
from autopar.planner.prices import PICOSECONDS, Prices
from autopar.planner.simulation import StepTime, simulate
from autopar.planner.state import StateSharding
from autopar.planner.state_prices import StatePrices
from autopar.planner.summary import Summary, summarise
from autopar.rules.strategies import DEFER, PASS_PARTIAL, Strategy
from autopar.searchers import Budget
from autopar.searchers import search as solve

SQUEEZES = 60
"""Eliminations that a problem with a memory limit may take."""
REFINEMENTS = 3
"""Rounds of search and simulation until the exposed share of traffic settles."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned: the model's graph, its batch, and where it is to run.

    ``obstacles``: why the batch may not be cut into microbatches; none: it may.
    """

    graph: Graph
    batch_dims: Mapping[str, int]
    data_choices: Mapping[str, str]
    batch: int
    obstacles: tuple[str, ...]
    cluster: Cluster
    precision: str
    optimizer: str
    fixed: Fixed
    searcher: str = "elimination"


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete layout with its decisions and what is predicted of it."""

    candidate: Candidate
    layout: Layout
    stage: Stage
    lowered: Lowered
    time: StepTime
    memory: Memory
    solution: Solution
    objective: int
    """Picoseconds, additive, as the searcher claimed it; `repricing.objective` gives it again."""
    exposed: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best answer, the bound over all candidates, and the best of each family that lost."""

    best: Answer
    lower_bound_s: float
    runners_up: tuple[RunnerUp, ...]
    tried: int


@dataclass(slots=True)
class _Solved:
    """A candidate's optimum with hidden traffic."""

    candidate: Candidate
    folded: Folded
    solution: Solution
    stage: Stage
    lowered: Lowered
    summary: Summary

    @property
    def bound_s(self) -> float:
        return self.solution.lower_bound / PICOSECONDS


Progress = Callable[[str], None]


@dataclass(slots=True)
class _Best:
    answer: Answer | None = None
    lost: dict[tuple[int, int, str], RunnerUp] = field(default_factory=dict)
    shortest: tuple[int, Candidate, Layout, Memory] | None = None


def search_plan(question: Question, progress: Progress = lambda _: None) -> Outcome:
    """The fastest layout that fits.

    Raises:
        DoesNotFit: nothing does; says what is short, by how much, and the cheapest change.
        FixError: the batch, the pinned degrees and the devices do not divide.
    """
    bindings = Bindings()
    best = _Best()
    bounds: list[float] = []
    tried = 0
    listed = candidates(question.cluster.device_count, question.batch, question.fixed)
    if question.obstacles:
        listed = _without_accumulation(listed, question.obstacles)
    by_degree: dict[int, list[Candidate]] = {}
    for candidate in listed:
        by_degree.setdefault(candidate.tp, []).append(candidate)
    firsts: list[_Solved] = []
    for family in by_degree.values():
        first = _solve(question, family[0], bindings)
        if first is not None:
            firsts.append(first)
    for first in sorted(firsts, key=lambda s: s.bound_s):
        bounds.append(first.bound_s)
        if _beaten(best, first):
            _lose_by_bound(best, first)
            continue
        for candidate in by_degree[first.candidate.tp]:
            solved: _Solved | None = first
            if candidate != first.candidate:
                solved = _solve(question, candidate, bindings)
            if solved is None:
                continue
            tried += 1
            if _beaten(best, solved):
                _lose_by_bound(best, solved)
                break
            progress(
                f"tp={candidate.tp} data={candidate.data} microbatches={candidate.microbatches}: "
                f"bound {solved.bound_s * 1e3:.4g} ms"
            )
            if _try_layouts(question, solved, best, bindings):
                break
    if best.answer is None:
        raise _too_big(question, best, listed)
    refined = _refine(question, best.answer, bindings)
    return Outcome(
        best=refined,
        lower_bound_s=min([*bounds, refined.time.total_s]),
        runners_up=_runners_up(best, refined),
        tried=tried,
    )


def _without_accumulation(listed: list[Candidate], obstacles: tuple[str, ...]) -> list[Candidate]:
    whole = [c for c in listed if c.microbatches == 1]
    if not whole:
        raise FixError(
            f"the batch cannot be cut into {listed[0].microbatches} microbatches: {obstacles[0]}; "
            "leave microbatch out of --fix, or give the whole batch of a rank"
        )
    return whole


def _beaten(best: _Best, solved: _Solved) -> bool:
    """Not even with all data traffic hidden would the candidate win."""
    known = best.answer
    return known is not None and solved.bound_s >= known.time.total_s


def _solve(
    question: Question,
    candidate: Candidate,
    bindings: Bindings,
    layout: Layout | None = None,
    exposed: float = 0.0,
    usage_limit: int | None = None,
    must_split: bool = False,
) -> _Solved | None:
    """The best sharding of all ops for a candidate; None where the model cannot be cut so.

    A model so small that tensor parallelism costs more than it saves would leave the tp ranks with
    the same work; such an answer is replaced by the best one that splits the products.
    """
    chosen = layout or Layout(1, candidate.data, 1 if candidate.data > 1 else 0, "none")
    mesh = chosen.mesh(candidate.tp)
    full = Mesh((MICROBATCH, *mesh.axes), (candidate.microbatches, *mesh.sizes)).trimmed()
    prices = Prices(question.cluster, full, question.precision)
    state = StatePrices(question.cluster, _state(question, chosen, candidate), exposed)
    try:
        folded = fold(
            question.graph,
            full,
            question.data_choices,
            question.batch_dims,
            prices,
            state,
            bindings,
            usage_limit,
            must_split,
            chosen.recompute != "none",
        )
        budget = Budget(
            evaluations=None if usage_limit is None else SQUEEZES * folded.problem.num_nodes
        )
        solution = solve(folded.problem, searcher=question.searcher, budget=budget)
    except (NoStrategy, NoFeasibleAnswer):
        return None
    stage = replace(folded.stage(solution.choice.tolist()), mesh=mesh)
    if candidate.tp > 1 and not must_split and not _splits(stage):
        return _solve(question, candidate, bindings, layout, exposed, usage_limit, True)
    lowered = _lower(question, stage, candidate)
    return _Solved(candidate, folded, solution, stage, lowered, summarise(lowered, prices))


def _lower(question: Question, stage: Stage, candidate: Candidate) -> Lowered:
    return lower(
        question.graph,
        stage,
        candidate.microbatches,
        question.data_choices,
        question.batch_dims,
    )


def _state(question: Question, layout: Layout, candidate: Candidate) -> StateSharding:
    return StateSharding(
        layout.zero,
        layout.mesh(candidate.tp),
        candidate.microbatches,
        question.precision,
        question.optimizer,
    )


def _try_layouts(question: Question, solved: _Solved, best: _Best, bindings: Bindings) -> bool:
    """Every state sharding of a solved candidate, by simulation; squeezes where none fits.

    True where memory did not bind: the fastest layout fits, so more microbatches cannot help.
    """
    fits = False
    fastest: Answer | None = None
    tightest: tuple[Memory, Layout] | None = None
    for layout in layouts(solved.candidate.data, question.fixed):
        answer = _answer(question, solved, layout)
        if fastest is None or _order(answer) < _order(fastest):
            fastest = answer
        if tightest is None or answer.memory.total < tightest[0].total:
            tightest = (answer.memory, layout)
        if answer.memory.total > answer.memory.limit:
            continue
        fits = True
        _keep(best, answer)
    if fits or tightest is None:
        return fastest is not None and fastest.memory.total <= fastest.memory.limit
    memory, layout = tightest
    squeezed = _squeeze(question, solved, layout, memory, bindings)
    if squeezed is not None:
        _keep(best, squeezed)
        return False
    short = memory.total - memory.limit
    if best.shortest is None or short < best.shortest[0]:
        best.shortest = (short, solved.candidate, layout, memory)
    return False


def _squeeze(
    question: Question, solved: _Solved, layout: Layout, memory: Memory, bindings: Bindings
) -> Answer | None:
    """Solves again with a price on memory, so that the tightest layout may fit after all."""
    over = memory.total - memory.limit
    if over > memory.activations:
        return None
    free = _solve(question, solved.candidate, bindings, layout, 1.0)
    if free is None:
        return None
    for share in (1.05, 1.5, 2.5):
        limit = int(free.solution.peak - share * over)
        if limit <= 0:
            return None
        again = _solve(question, solved.candidate, bindings, layout, 1.0, limit)
        if again is None:
            return None
        answer = _answer(question, again, layout)
        if answer.memory.total <= answer.memory.limit:
            return answer
    return None


def _answer(question: Question, solved: _Solved, layout: Layout) -> Answer:
    state = _state(question, layout, solved.candidate)
    device = question.cluster.device
    memory = step_memory(
        solved.summary, state, layout.recompute, question.cluster.memory_bytes, device.kind
    )
    time = simulate(solved.summary, state, question.cluster, layout.recompute)
    return Answer(
        solved.candidate,
        layout,
        solved.stage,
        solved.lowered,
        time,
        memory,
        solved.solution,
        solved.solution.cost,
        0.0,
    )


def _keep(best: _Best, answer: Answer) -> None:
    before = best.answer
    if before is None or _order(answer) < _order(before):
        best.answer = answer
        if before is not None:
            _lose(best, before, "slower")
    else:
        _lose(best, answer, "slower")


def _splits(stage: Stage) -> bool:
    """The tensor-parallel ranks split some op (``tp:D`` and ``tp:P`` split nothing)."""
    choices = (Strategy.parse(text).on("tp") for text in stage.ops.values())
    return any(choice not in ("", DEFER, PASS_PARTIAL) for choice in choices)


def _order(answer: Answer) -> tuple[float, int, int, int]:
    """Fastest first; between equals, the one that shards and recomputes least."""
    return (
        round(answer.time.total_s, 12),
        RECOMPUTE.index(answer.layout.recompute),
        answer.layout.zero,
        answer.layout.dp_shard,
    )


def _lose(best: _Best, answer: Answer, reason: str) -> None:
    family = (answer.candidate.tp, answer.layout.zero, answer.layout.recompute)
    known = best.lost.get(family)
    if known is None or answer.time.total_s < known.step_time_s:
        best.lost[family] = _runner_up(answer, reason)


def _lose_by_bound(best: _Best, solved: _Solved) -> None:
    family = (solved.candidate.tp, -1, "")
    if any(k[0] == solved.candidate.tp for k in best.lost):
        return
    best.lost[family] = RunnerUp(
        degrees={"dp": solved.candidate.data, "tp": solved.candidate.tp},
        zero=0,
        microbatches=solved.candidate.microbatches,
        step_time_s=solved.bound_s,
        memory_bytes=0,
        reason="cannot beat the best: this is its lower bound, all data traffic hidden",
    )


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


def _runners_up(best: _Best, winner: Answer, count: int = 5) -> tuple[RunnerUp, ...]:
    """The best of each family that lost, with where its time goes against the winner's."""
    own = (winner.candidate.tp, winner.layout.zero, winner.layout.recompute)
    ordered = sorted(
        (r for family, r in best.lost.items() if family != own), key=lambda r: r.step_time_s
    )
    return tuple(
        replace(r, reason=f"{r.step_time_s / winner.time.total_s - 1:+.1%}, {r.reason}")
        if r.reason == "slower"
        else r
        for r in ordered[:count]
    )


def _refine(question: Question, answer: Answer, bindings: Bindings) -> Answer:
    """Prices data traffic at what the simulation left exposed, until objective and time agree."""
    best = answer
    exposed = answer.time.exposed_share
    for _ in range(REFINEMENTS):
        solved = _solve(question, answer.candidate, bindings, answer.layout, exposed)
        if solved is None:
            break
        again = replace(_answer(question, solved, answer.layout), exposed=exposed)
        if again.memory.total <= again.memory.limit and (
            again.time.total_s <= best.time.total_s or best is answer
        ):
            if again.time.total_s <= best.time.total_s:
                best = again
        if abs(again.time.exposed_share - exposed) < 0.01:
            break
        exposed = again.time.exposed_share
    if best is answer:
        best = _as_layout(question, answer)
    return best


def _as_layout(question: Question, answer: Answer) -> Answer:
    """The same decisions on the mesh of the chosen layout (the search used one data axis)."""
    stage = replace(answer.stage, mesh=answer.layout.mesh(answer.candidate.tp))
    lowered = _lower(question, stage, answer.candidate)
    return replace(answer, stage=stage, lowered=lowered)


def _too_big(question: Question, best: _Best, listed: list[Candidate]) -> DoesNotFit:
    device = question.cluster.device
    if best.shortest is None:
        return DoesNotFit(
            f"no layout of {len(listed)} candidates can cut this model over "
            f"{question.cluster.device_count} devices: see `--fix` to name one and learn why"
        )
    short, candidate, layout, memory = best.shortest
    gb = 1e9
    shares = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
        "buffers": memory.buffers,
    }
    largest = max(shares, key=lambda n: shares[n])
    state = memory.parameters + memory.gradients + memory.optimizer
    more = -(-memory.total // memory.limit)
    change = (
        f"a device with {memory.total / gb:.1f} GB, or about {more}x as many devices"
        if state > memory.limit // 2
        else "a smaller batch or shorter sequences (fewer samples per rank and microbatch)"
    )
    return DoesNotFit(
        f"nothing fits {device.name} with {memory.limit / gb:.1f} GB: the tightest layout "
        f"(dp_shard={layout.dp_shard}, tp={candidate.tp}, ZeRO {layout.zero}, "
        f"{candidate.microbatches} microbatches, recompute {layout.recompute}) needs "
        f"{memory.total / gb:.1f} GB, {short / gb:.1f} GB too much; "
        + ", ".join(f"{n} {v / gb:.1f} GB" for n, v in shares.items())
        + f". Most goes to {largest}. The cheapest change that would fit: {change}."
    )
