"""What else was close obeys the rules that the planner obeyed, or is told with what forbids it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from autopar.nouns.cluster import Cluster
from autopar.nouns.plan import Stage
from autopar.planner.search.layouts import search_plan
from autopar.report.alternatives import alternatives
from autopar.report.explain import explain
from autopar.report.explained import Alternative
from autopar.report.render import to_text
from autopar.report.revisit import Revisited, revisit, splits_nothing
from tests import plans
from tests.planner.graphs import gpt
from tests.planner.test_search import BATCH, LARGE, NODE, memory_limited, question


def planned_again(
    sizes: Mapping[str, int], samples: int, cluster: Cluster, fix: Mapping[str, str]
) -> Revisited:
    graph = gpt(layers=2, **sizes)
    best = search_plan(question(graph, samples, cluster, fix)).best
    plan = plans.plan(
        spreads=(best.decided.spread,),
        stages=(Stage(zero=best.decided.layout.zero, recompute=best.decided.layout.recompute),),
        microbatches=best.decided.candidate.microbatches,
        precision="float32",
    )
    return revisit(plan, cluster, graph, BATCH)


def others(again: Revisited) -> list[Alternative]:
    nodes = [(i, n.options) for i, n in enumerate(again.folded.nodes) if n.kind == "op"]
    by_node = alternatives(
        again.folded.problem, again.choice, nodes, most=99, objection=again.objection
    )
    return [other for several in by_node.values() for other in several]


def test_where_tp_must_split_the_alternatives_split_too() -> None:
    again = planned_again({"heads": 8}, 8, NODE, {"tp": "8"})
    (rule,) = again.forbidden
    assert rule.rule == splits_nothing(["tp"])
    assert rule.extra_s < 0
    listed = others(again)
    assert listed
    assert all(other.extra_s >= 0 for other in listed)
    text = to_text(explain([], {}, 1.0, (), again.forbidden))
    assert "Not allowed, though" in text
    assert splits_nothing(["tp"]) in text


def test_a_plan_that_memory_forced_says_what_its_alternatives_lack() -> None:
    fix = {"tp": "8", "microbatch": "8", "recompute": "none"}
    free = search_plan(question(gpt(layers=2, **LARGE), 32, NODE, fix)).best.priced.memory
    limit = free.total - int(0.15 * free.activations)
    again = planned_again(LARGE, 32, memory_limited(limit), fix)
    cheaper = [other for other in others(again) if other.extra_s < 0]
    assert cheaper
    for other in cheaper:
        assert "does not fit by" in other.objection or "slower" in other.objection
        assert "+-" not in str(other)
        assert str(other).startswith(f"{other.strategy} -")


@pytest.mark.parametrize("tp", ["1", "4"])
def test_a_free_choice_has_no_cheaper_alternative(tp: str) -> None:
    again = planned_again(LARGE, 32, NODE, {"tp": tp})
    assert not again.forbidden
    assert all(other.extra_s >= 0 and not other.objection for other in others(again))
