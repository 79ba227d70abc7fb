"""Every searcher plans, tells how it goes, and gives its best when it is stopped."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from autopar.files.cluster_file import load_cluster
from autopar.nouns.layout import Pins
from autopar.nouns.plan import key
from autopar.nouns.problem import Problem
from autopar.nouns.recompute import KEEP_ALL
from autopar.nouns.solution import Solution
from autopar.planner.ask.candidates import StateLayout, candidates
from autopar.planner.ask.question import Answer, Question
from autopar.planner.problem import solving
from autopar.planner.problem.solving import Solver
from autopar.planner.search.layouts import search_plan
from autopar.planner.solve import standings
from autopar.planner.solve.solved import Charged, lowered_of, solve, state_of
from autopar.planner.solve.standings import Standings
from autopar.pricing.prices import Prices
from autopar.pricing.repricing import objective
from autopar.pricing.state_prices import StatePrices
from autopar.rules.cut import Cuts, batch_cut
from autopar.searchers import SEARCHERS, Budget, Progress
from tests.planner.graphs import gpt

CLUSTER = load_cluster("examples/clusters/cpu_4.yaml")
BATCH = {"ids": 0, "labels": 0}
GRAPH = gpt(layers=2)


def question(searcher: str, verbose: bool = False, tp: int | None = None) -> Question:
    return Question(
        graph=GRAPH,
        cuts=Cuts(batch_cut(GRAPH, BATCH).samples),
        batch=8,
        obstacles=(),
        cluster=CLUSTER,
        precision="float32",
        optimizer="adamw",
        pins=Pins(tp=tp),
        searcher=searcher,
        verbose=verbose,
    )


@pytest.mark.parametrize("searcher", SEARCHERS)
@pytest.mark.parametrize("exposed", [0.0, 0.4, 1.0])
def test_a_plan_priced_again_has_the_objective_of_its_search(searcher: str, exposed: float) -> None:
    of = question(searcher, tp=2)
    (candidate, *_) = candidates(4, 8, of.pins)
    charged = Charged(StateLayout(1, 2, 3, KEEP_ALL), exposed)
    solved = solve(of, candidate, Solver(searcher), charged)
    assert solved is not None
    lowered = lowered_of(of, solved.decided(candidate, charged.layout))
    state = StatePrices(CLUSTER, state_of(of, charged.layout, candidate), exposed)
    again = objective(lowered, Prices(CLUSTER, lowered.mesh, "float32"), state)
    assert again == solved.solution.cost


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_every_searcher_plans(searcher: str) -> None:
    lines: list[str] = []
    outcome = search_plan(question(searcher, verbose=True, tp=4), lines.append)
    assert set(outcome.best.decided.spread.ops) <= {
        key(block, op.name)
        for block, graph in [(None, GRAPH), *((n, b.body) for n, b in GRAPH.blocks.items())]
        for op in graph.ops
    }
    assert outcome.best.decided.searcher.startswith(searcher)
    assert any("best " in line for line in lines)
    if searcher != "brute_force":  # cannot see all of it, and has no bound before that
        assert any("bound " in line for line in lines)
    assert outcome.lower_bound_s <= outcome.best.priced.time.total_s


def test_progress_is_one_line_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(solving, "time", SimpleNamespace(monotonic=lambda: next(clock) * 0.4))
    lines: list[str] = []
    line = solving._Line(solving.Solver("elimination", lines.append), "tp=4")
    for k in range(10):
        line(Progress("elimination", 3 * 10**9, 1.5e9, k, 0.4 * k, "a step"))
    assert len(lines) == 3
    assert lines[0] == "tp=4: best 3 ms, bound 1.5 ms, gap 50.00%, 0.8 s, a step"


def interrupting(after: int) -> Callable[..., Solution]:
    """A search in which the user presses Ctrl-C during call number ``after``."""
    calls = 0

    def solve(problem: Problem, searcher: str, budget: Budget, progress: object) -> Solution:
        nonlocal calls
        calls += 1

        def press(best: Progress) -> None:
            if calls == after and best.cost is not None:
                raise KeyboardInterrupt

        return SEARCHERS[searcher](problem, budget, 0, press)

    return solve


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_stopped_search_gives_its_best(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    monkeypatch.setattr(solving, "solve", interrupting(after))
    lines: list[str] = []
    outcome = search_plan(question("mcmc"), lines.append)
    assert any(line.startswith("stopped") for line in lines)
    assert outcome.lower_bound_s == 0.0
    assert outcome.best.priced.memory.total <= outcome.best.priced.memory.limit
    assert outcome.tried <= after


@pytest.mark.parametrize("after", [1, 2, 7, 12, 20, 30])
def test_whenever_a_search_is_stopped_nothing_faster_was_seen(
    monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Between two answers of one candidate, or of one pipeline, as well as between searches."""
    seen: list[Answer] = []
    one_by_one = standings.offer

    def offer(now: Standings, answer: Answer) -> Standings:
        if len(seen) == after:
            raise KeyboardInterrupt
        seen.append(answer)
        return one_by_one(now, answer)

    monkeypatch.setattr(standings, "offer", offer)
    outcome = search_plan(question("elimination"))
    assert outcome.lower_bound_s == 0.0
    assert len(seen) == after
    fitting = [standings.order(answer) for answer in seen if answer.priced.memory.fits]
    assert standings.order(outcome.best) <= min(fitting)


def test_stopped_before_any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(*_: object, **__: object) -> Solution:
        raise KeyboardInterrupt

    monkeypatch.setattr(solving, "solve", solve)
    with pytest.raises(KeyboardInterrupt):
        search_plan(question("elimination"))
