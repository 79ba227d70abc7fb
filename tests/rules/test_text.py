"""Every value of rules and shardings has a text that reads back as the same value."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.nouns.axes import AXES
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Placement, Sharding
from autopar.rules.binding import bind_rule
from autopar.rules.notation import Rule, RuleError
from autopar.rules.registry import bind
from autopar.rules.rule_text import parse_term
from autopar.rules.strategies import Strategy, strategies
from tests.rules.cases import CASES, build

placements = st.one_of(
    st.sampled_from("RDP").map(Placement), st.integers(0, 12).map(lambda d: Placement("S", d))
)
axes = st.lists(st.sampled_from(AXES), unique=True).map(
    lambda chosen: sorted(chosen, key=AXES.index)
)


@given(placements)
def test_placements(placement: Placement) -> None:
    assert Placement.parse(str(placement)) == placement


@given(axes, st.data())
def test_shardings(names: list[str], data: st.DataObject) -> None:
    sharding = Sharding.of((a, data.draw(placements)) for a in names)
    assert Sharding.parse(str(sharding)) == sharding


@given(axes, st.data())
def test_meshes(names: list[str], data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.integers(1, 512)) for _ in names)
    mesh = Mesh(tuple(names), sizes)
    assert Mesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize("kind", sorted(CASES))
@pytest.mark.some(90)
def test_bound_rules_and_strategies(kind: str) -> None:
    """The text of a bound rule, bound to the same shapes, is the same rule."""

    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        drawn = build(kind, data)
        bound = bind(drawn.op, drawn.nouns)
        shapes = [[tuple(t.shape) for t in part] for part in (drawn.operands, drawn.results)]
        again = bind_rule(replace(bound.rule, text=str(bound)), shapes[0], shapes[1])
        assert (again.operands, again.results) == (bound.operands, bound.results)
        assert dict(again.factors) == dict(bound.factors)
        for strategy in strategies(bound, Mesh(("dp_shard", "tp"), (2, 2)), True):
            assert Strategy.parse(str(strategy)) == strategy

    run()


def bound_text(text: str, operands: list[tuple[int, ...]], *results: tuple[int, ...]) -> str:
    return str(bind_rule(Rule(text), operands, results))


def test_binding() -> None:
    assert bound_text("... k+, n k+ -> ... n", [(2, 3, 8), (5, 8)], (2, 3, 5)) == (
        "e0 e1 k+, n k+ -> e0 e1 n"
    )
    # An operand of size one has none of the factor; extents that no dim shows are written.
    assert bound_text("..., ... -> ...", [(4, 1), (3,)], (4, 3)) == "e0 1, e1 -> e0 e1"
    assert bound_text("(a=2 b) -> (a b)", [(6,)], (6,)) == "(a=2 b=3) -> (a=2 b=3)"
    assert bound_text("t+ v!, t+ -> ", [(4, 5), (4,)], ()) == "t+ v!, t+ ->"
    assert bound_text("-> a b", [], (2, 3)) == "-> a b"


@pytest.mark.parametrize(
    ("text", "operands", "result", "message"),
    [
        ("a b", [(2, 3)], (2, 3), "has no ->"),
        ("a b -> a b", [(2, 3), (2, 3)], (2, 3), "has 1 operands, the op has 2"),
        ("a b, a -> a b", [(2, 3), (3,)], (2, 3), "factor a is both 2 and 3"),
        ("a b -> a", [(2, 3)], (2,), "factor b is missing from a result; mark it +"),
        ("a+ -> a", [(2,)], (2,), "marked + but a result has it"),
        ("a+! -> ", [(2,)], (), "marked both + and !"),
        ("(a b) -> a b", [(6,)], (2, 4), "makes 8, the dim has 6"),
        ("(a b) -> (a b)", [(6,)], (6,), "write one of them as a=<size>"),
        ("a -> a", [(3, 2)], (3, 2), "a term has 1 dims, the tensor is [3, 2]"),
        ("a 1 -> a", [(3, 2)], (3,), "a dim written 1 has size 2"),
        ("a b -> a b", [(3, 2)], (3, 1), "a result dim of size 1 stands for (b), which makes 2"),
        ("... e1 -> ... e1", [(3, 2)], (3, 2), "e0, e1, ... are the dims of its ..."),
    ],
)
def test_rules_that_do_not_fit(
    text: str, operands: list[tuple[int, ...]], result: tuple[int, ...], message: str
) -> None:
    with pytest.raises(RuleError) as caught:
        bound_text(text, operands, result)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ["a (b", "a b)", "((a) b)", "a?", "(a 1)", "(a ...)", "... ... a", "a=b"]
)
def test_terms_that_cannot_be_read(text: str) -> None:
    with pytest.raises(RuleError):
        parse_term(text)
