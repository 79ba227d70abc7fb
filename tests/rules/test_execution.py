"""Every rule against execution: split by any legal strategy, an op computes what the whole op does.

Operands are cut as the strategy's shardings say, the op runs on each simulated rank, results are
put together again; then gradients go back the same way (see `tests.rules.simulate`).
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.nouns.kinds import KINDS
from autopar.nouns.mesh import Mesh
from autopar.rules.notation import PASS_ALONE, BoundRule
from autopar.rules.registry import bind
from autopar.rules.strategies import NOTHING, Strategy, strategies
from autopar.rules.table import TABLE
from tests.rules.cases import CASES, build
from tests.rules.drawing import Case
from tests.rules.simulate import check

ONE_AXIS = [Mesh(("a",), (n,)) for n in (2, 3, 4)]
TWO_AXES = [Mesh(("a", "b"), sizes) for sizes in ((2, 2), (2, 3), (4, 2))]
PAIRS = 3  # strategies of two choices that split something, tried on each two-axis mesh

# Kinds of which no factor may be split, and why.
NEVER_SPLIT = {
    "aten::_pdist_forward": "every row meets every other",
    "aten::masked_scatter": "a place is filled by how many were before it",
    "arange": "its values depend on the index",
    "constant": "its values depend on the index",
    "carry": "the buffer is whole on every rank",
}


def tried(kind: str, case: Case, bound: BoundRule) -> set[str]:
    """Checks one-axis strategies and a sample of two-axis ones; returns the choices made.

    Those that split no factor do not depend on how many ranks there are: on the smallest mesh.
    """
    made: set[str] = set()
    grad = any(t.requires_grad for t in case.results)
    for mesh in ONE_AXIS:
        for strategy in strategies(bound, mesh, grad):
            if mesh == ONE_AXIS[0] or splits(strategy, bound):
                check(case, bound, strategy, mesh)
                made |= {c for _, c in strategy.choices}
    for place in bound.rule.alone if grad else ():
        check(case, bound, Strategy((("a", PASS_ALONE[place]),)), ONE_AXIS[0])
    draw = random.Random(str(bound))
    for mesh in TWO_AXES:
        legal = strategies(bound, mesh, grad)
        whole = [s for s in legal if not splits(s, bound)] if mesh == TWO_AXES[0] else []
        cut = [s for s in legal if splits(s, bound) and len(s.choices) == 2]
        for some, pairs in ((cut, PAIRS), (whole, 1)):
            for strategy in draw.sample(some, min(pairs, len(some))):
                check(case, bound, strategy, mesh)
    return made


def splits(strategy: Strategy, bound: BoundRule) -> bool:
    return any(choice in bound.factors for _, choice in strategy.choices)


def test_every_kind_has_a_rule_and_a_case() -> None:
    assert {k for k in TABLE if "::" not in k} == set(KINDS) - {"block"}
    assert set(TABLE) == set(CASES)


@pytest.mark.parametrize("kind", sorted(CASES))
@pytest.mark.some(130)
def test_split_equals_whole(kind: str) -> None:
    made: set[str] = set()

    def run(data: st.DataObject) -> None:
        drawn = build(kind, data)
        made.update(tried(kind, drawn, bind(drawn.op, drawn.nouns)))

    for examples in (12, 60):  # what hypothesis draws varies with the modules that are loaded
        settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )(given(st.data())(run))()
        if made - {NOTHING, "D", "P"}:
            break
    split = made - {NOTHING, "D", "P"}
    assert bool(split) != (kind in NEVER_SPLIT), f"{kind}: only {made} tried"
