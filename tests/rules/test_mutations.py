"""The check against execution must be able to fail: wrong rules, each caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding
from autopar.rules.binding import bind_rule
from autopar.rules.notation import BoundRule
from autopar.rules.registry import bind, rule_for
from autopar.rules.strategies import Strategy, shardings, strategies
from tests.rules import simulate
from tests.rules.drawing import Case, case
from tests.rules.simulate import check

AXIS = Mesh(("a",), (2,))


def _real(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.rand(shape, generator=generator, dtype=torch.double).requires_grad_()


def _attention() -> Case:
    attrs = {"causal": False, "scale": None, "dropout_p": 0.0}
    return case("attention", [_real(2, 4, 2, 4), _real(2, 2, 2, 4), _real(2, 2, 2, 4)], attrs)


def _layer_norm() -> Case:
    return case("layer_norm", [_real(4, 6), _real(6), _real(6)], {"dims": 1, "eps": 1e-5})


# A right op, its rule made wrong, and a strategy that only the wrong rule allows.
MUTATIONS: dict[str, tuple[Callable[[], Case], str, str]] = {
    "softmax over a split dim": (
        lambda: case("softmax", [_real(4, 6)], {"dim": -1}),
        "a b -> a b",
        "a:b",
    ),
    "statistics of a piece of the row": (_layer_norm, "b c, c, c -> b c", "a:c"),
    "attention that adds up over pieces of the keys": (
        _attention,
        "b (g=2 r=2) s! d!, b g t+ d!, b g t+ e! -> b (g r) s! e!",
        "a:t",
    ),
    "query heads in the wrong order": (
        _attention,
        "b (r=2 g=2) s! d!, b g t! d!, b g t! e! -> b (r g) s! e!",
        "a:r",
    ),
    "a reshape whose minor factor leads": (
        lambda: case("reshape", [_real(4, 6)], {"shape": (24,)}),
        "a b -> (b a)",
        "a:b",
    ),
    "a flip of each piece": (lambda: case("flip", [_real(8)], {"dims": (0,)}), "a -> a", "a:a"),
    "a maximum taken for a sum": (
        lambda: case("amax", [_real(4, 6)], {"dims": (1,), "keepdim": False}),
        "a b+ -> a",
        "a:b",
    ),
    "an exponential of a partial sum": (lambda: case("exp", [_real(4)], {}), "a -> a", "a:P"),
    "a scalar added to a partial sum": (
        lambda: case("add", [_real(4)], {"other": 1.0}),
        "a -> a",
        "a:P",
    ),
    "a product of two partial sums": (
        lambda: case("mul", [_real(4), _real(4)], {}),
        "a, a -> a",
        "a:P",
    ),
}


@pytest.mark.parametrize("name", list(MUTATIONS))
def test_wrong_rules_are_caught(name: str) -> None:
    make, text, strategy = MUTATIONS[name]
    op = make()
    split = Strategy.parse(strategy)
    assert split not in strategies(bind(op.op, op.nouns), AXIS, True)
    wrong = bind_rule(
        replace(rule_for(op.op, op.nouns), text=text, linear=True, partials=None),
        [tuple(t.shape) for t in op.operands],
        [tuple(t.shape) for t in op.results],
    )
    assert split in strategies(wrong, AXIS, True)
    with pytest.raises(AssertionError):
        check(op, wrong, split, AXIS)


def test_a_gradient_that_is_not_reduced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight beside a split batch has a partial gradient; calling it whole must fail."""
    op = _layer_norm()
    bound, split = bind(op.op, op.nouns), Strategy.parse("a:e0")
    check(op, bound, split, AXIS)

    def whole(bound: BoundRule, strategy: Strategy, *rest: Any) -> tuple[Any, ...]:
        wants, gives = shardings(bound, strategy, *rest)
        kept = tuple(Sharding.of((a, p) for a, p in w.placements if p.kind != "D") for w in wants)
        return kept, gives

    monkeypatch.setattr(simulate, "shardings", whole)
    with pytest.raises(AssertionError, match="gradient of operand 1"):
        check(op, bound, split, AXIS)
