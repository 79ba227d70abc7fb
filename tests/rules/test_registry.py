"""Rules of users: one line, first in line, and a message that says how where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import autopar
from autopar.nouns.graph import Op, Source, Tensor
from autopar.nouns.mesh import Mesh
from autopar.rules.advice import no_rule, suggestion
from autopar.rules.binding import bind_rule
from autopar.rules.kept import Kept
from autopar.rules.notation import Implemented, Internal, Rule, RuleError
from autopar.rules.registry import UnruledOp, bind, registered_kinds, unregister
from autopar.rules.strategies import Strategy, shardings, strategies

TENSORS = {
    "x": Tensor("x", (4, 6, 8), "float32", differentiable=True),
    "w": Tensor("w", (8,), "float32", "parameter", True),
    "y": Tensor("y", (4, 6, 8), "float32", differentiable=True),
}
OP = Op("mylib::scale", ("x", "w"), ("y",), {}, Source("blocks.0.mlp", "model.py", 12))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    unregister("mylib::scale")
    unregister("add")


def test_one_line_registers_a_rule() -> None:
    autopar.register_rule("mylib::scale", "b s d, d -> b s d")
    bound = bind(OP, TENSORS)
    assert str(bound) == "b s d, d -> b s d"
    assert bound.rule.saves == (0, 1)
    names = {str(s) for s in strategies(bound, Mesh(("tp",), (2,)), True)}
    assert names == {"whole", "tp:b", "tp:s", "tp:d", "tp:D"}
    assert "mylib::scale" in registered_kinds()


def test_a_summed_index_counts_as_a_product() -> None:
    autopar.register_rule("mylib::scale", "b s k+, k+ -> b s")
    op = Op("mylib::scale", ("x", "w"), ("z",))
    rule = bind(op, TENSORS | {"z": Tensor("z", (4, 6), "float32")}).rule
    assert (rule.flops, rule.cost) == (2.0, "matmul")


def test_a_registered_rule_comes_before_a_built_in_one() -> None:
    before = bind(Op("add", ("x", "w"), ("y",)), TENSORS)
    autopar.register_rule("add", Rule("b! s d!, d! -> b! s d!"))
    assert str(bind(Op("add", ("x", "w"), ("y",)), TENSORS)) == "b! s d!, d! -> b! s d!"
    unregister("add")
    assert bind(Op("add", ("x", "w"), ("y",)), TENSORS) == before


def test_lists_in_a_rule_are_as_good_as_tuples() -> None:
    text = "b s d, d -> b s d"
    lists: Any = {
        "saves": [0, 1],
        "keeps": [Kept(["b", "s"], 4)],  # type: ignore[arg-type]
        "flop_terms": [(2.0, ["b", "s", "d"]), [1.0, ["d"]]],
        "partials": range(1),
    }
    autopar.register_rule("mylib::scale", Rule(text, **lists))
    assert bind(OP, TENSORS).rule == Rule(
        text,
        saves=(0, 1),
        keeps=(Kept(("b", "s"), 4),),
        flop_terms=((2.0, ("b", "s", "d")), (1.0, ("d",))),
        partials=(0,),
    )


def test_a_text_that_cannot_be_read_is_refused_at_once() -> None:
    with pytest.raises(RuleError, match="has no ->"):
        autopar.register_rule("mylib::scale", "b s d, d")
    with pytest.raises(RuleError, match="names with marks"):
        autopar.register_rule("mylib::scale", "b s? -> b")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("B S D, D -> B S D", "B S D_, D_ -> B S D_"),
        ("P S D~, D -> P S D", "P_ S D_~, D_~ -> P_ S D_~"),
        ("D D_ D__, D__ -> D D_ D__", "D___ D_ D__, D__ -> D___ D_ D__"),
        ("b B d, d -> b B d", "b B d, d -> b B d"),
        ("ä ß δ, δ -> ä ß δ", "ä ß δ, δ -> ä ß δ"),
        ("... D, D -> ... D", "e0 e1 D_, D_ -> e0 e1 D_"),
    ],
)
def test_factors_have_names_of_any_letters(text: str, shown: str) -> None:
    autopar.register_rule("mylib::scale", text)
    bound = bind(OP, TENSORS)
    assert str(bound) == shown
    again = bind_rule(Rule(shown), [(4, 6, 8), (8,)], [(4, 6, 8)])
    assert (again.operands, again.factors) == (bound.operands, bound.factors)
    by_choice = {str(s): s for s in strategies(bound, Mesh(("tp",), (2,)), True)}
    assert set(by_choice) == {"whole", "tp:D", *(f"tp:{name}" for name in bound.factors)}
    for written, strategy in by_choice.items():
        assert Strategy.parse(written) == strategy
    last = bound.operands[1][0][0]  # D of the user's
    mesh, chosen = Mesh(("tp",), (2,)), Strategy((("tp", last),))
    operands, results = shardings(bound, chosen, mesh, (True, True), (True,))
    assert list(map(str, (*operands, *results))) == ["tp:S2", "tp:S0", "tp:S2"]


def test_what_a_rule_says_of_a_factor_follows_its_name() -> None:
    rule = Rule(
        "B S D, D -> B S D",
        keeps=(Kept(("B", "D"), 4),),
        flop_terms=((2.0, ("B", "D")),),
        implementations=(
            Implemented(
                "D",
                "synchronised",
                (Internal("all_reduce", "forward", ("S", "D"), 1, "float32"),),
            ),
        ),
    )
    autopar.register_rule("mylib::scale", rule)
    bound = bind(OP, TENSORS).rule
    assert bound.keeps == (Kept(("B", "D_"), 4),)
    (implemented,) = bound.implementations
    assert (implemented.factor, implemented.name) == ("D_", "synchronised")
    assert implemented.moves[0].dims == ("S", "D_")
    assert bound.flop_terms == ((2.0, ("B", "D_")),)


def test_an_implementation_that_there_is_not_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(RuleError, match="no implementation: there are masked_lookup, voc"):
        Implemented("s", "ring_of_fire")


@pytest.mark.parametrize(
    ("kind", "rule", "told"),
    [
        (None, "b -> b", "the op comes first, by its name"),
        ("", "b -> b", "the op comes first, by its name"),
        ("mylib::scale", None, "give the rule as text"),
        ("mylib::scale", ["b -> b"], "give the rule as text"),
        ("mylib::scale", "B+ S!, B! -> S", "factor B is marked both"),
        ("mylib::scale", "2b -> 2b", "names with marks"),
        ("mylib::scale", "b-s -> b-s", "names with marks"),
    ],
)
def test_what_is_no_rule_is_refused_at_once(kind: Any, rule: Any, told: str) -> None:
    with pytest.raises(RuleError, match=told):
        autopar.register_rule(kind, rule)


def test_a_rule_that_does_not_fit_names_the_op() -> None:
    autopar.register_rule("mylib::scale", "b s d -> b s d")
    with pytest.raises(RuleError) as caught:
        bind(OP, TENSORS)
    text = str(caught.value)
    assert text.startswith("op 'mylib::scale' at blocks.0.mlp (model.py:12): ")
    assert "has 1 operands, the op has 2: [4, 6, 8] [8]" in text


def test_an_op_without_a_rule_says_what_to_type() -> None:
    with pytest.raises(UnruledOp) as caught:
        bind(OP, TENSORS)
    text = str(caught.value)
    assert "'mylib::scale'" in text
    assert "blocks.0.mlp (model.py:12)" in text
    assert "float32[4, 6, 8], float32[8] to float32[4, 6, 8]" in text
    assert (
        "in the notation of\n    autopar.register_rule('mylib::scale', 'b s d, d -> b s d')" in text
    )


def test_a_rule_that_held_is_shown_as_the_line_to_type() -> None:
    operands, results = [TENSORS["x"], TENSORS["w"]], [TENSORS["y"]]
    text = no_rule(OP, operands, results, "a b c, c -> a b c")
    assert "autopar.register_rule('mylib::scale', 'a b c, c -> a b c')" in text
    assert "held when the op was run whole and in pieces" in text


def test_no_rule_is_suggested_for_random_numbers() -> None:
    """Split by it, they would be others than on one device."""
    op = Op("aten::poisson", ("x",), ("y",), {}, Source("vae", "model.py", 12))
    with pytest.raises(UnruledOp, match="draws random numbers") as caught:
        bind(op, TENSORS)
    assert "vae (model.py:12)" in str(caught.value)
    assert "register_rule" not in str(caught.value)


@pytest.mark.parametrize(
    ("operands", "results"),
    [
        ([(4, 6, 8), (8,)], [(4, 6, 8)]),
        ([(8, 5), (8,)], [(8,)]),
        ([(8, 3, 5), (7,)], [(8, 3), (8,)]),
        ([(2, *[3] * 29)], [(2, *[3] * 29)]),
    ],
)
def test_suggestions_fit(operands: list[tuple[int, ...]], results: list[tuple[int, ...]]) -> None:
    """They split the leading dim, and read back as they are."""
    text = suggestion(operands, results)
    bound = bind_rule(Rule(text), operands, results)
    assert str(bound) == text
    assert {n for n, f in bound.factors.items() if f.kind == "parallel"} == {text[0]}


def test_a_suggestion_aligns_rows_at_the_left() -> None:
    assert suggestion([(8, 5), (8,)], [(8,)]) == "a b!, a -> a"


@pytest.mark.parametrize(
    ("operands", "results"),
    [
        ([], [(3, 3)]),
        ([(1, 5)], [()]),
        ([(4, 6), (6, 4)], [(6, 4)]),
        ([(4, 6), (6, 4)], [(4, 4)]),
        ([(4, 4)], [(4,)]),  # as torch.diagonal
        ([(4,)], [(4, 4)]),  # as torch.diag
        ([(128, 101), (128,)], [()]),
        ([(50, 16), (8,)], [(8, 16), (8,)]),
    ],
)
def test_no_suggestion_where_none_would_help(
    operands: list[tuple[int, ...]], results: list[tuple[int, ...]]
) -> None:
    assert suggestion(operands, results) == ""
    shapes = operands + results
    names = [f"t{i}" for i in range(len(shapes))]
    op = Op("mylib::scale", tuple(names[: len(operands)]), tuple(names[len(operands) :]))
    tensors = {n: Tensor(n, s, "float32") for n, s in zip(names, shapes, strict=True)}
    with pytest.raises(UnruledOp, match="in the notation of") as caught:
        bind(op, tensors)
    assert "!" not in str(caught.value).partition("register_rule(")[2].partition(")")[0]
