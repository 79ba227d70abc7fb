"""Rules tried by execution: wrong ones are refuted, in words that say where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import autopar
from autopar.frontends.dispatch import executor
from autopar.nouns.graph import Graph, Op, Source, Tensor
from autopar.planner.ask.unruled import check_allowed, check_registered, unruled
from autopar.rules.binding import bind_rule
from autopar.rules.notation import Rule, RuleError
from autopar.rules.registry import UnruledOp, unregister
from autopar.rules.trial import MOST_ELEMENTS, Verdict, try_rule

EXECUTE = executor("torch")
Shape = tuple[int, ...]


class _Averaging(torch.autograd.Function):
    """Doubles in forward; its backward divides by the number of rows that it sees."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2 / g.shape[0]


AVERAGING: Any = _Averaging
torch_library: Any = torch.library
LIBRARY = torch_library.Library("trial", "DEF")
LIBRARY.define("averaging(Tensor x) -> Tensor")
LIBRARY.impl("averaging", lambda x: AVERAGING.apply(x), "CompositeImplicitAutograd")
LIBRARY.define("refusing(Tensor x) -> Tensor")


def _refuse(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("needs an accelerator")


LIBRARY.impl("refusing", _refuse, "CompositeImplicitAutograd")
LIBRARY.define("noisy(Tensor x) -> Tensor")
LIBRARY.impl("noisy", lambda x: x + torch.rand_like(x), "CompositeImplicitAutograd")
LIBRARY.define("single(Tensor x) -> Tensor")


def _single(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float64:
        raise RuntimeError("float64 is not supported")
    return x.cumsum(-1)


LIBRARY.impl("single", _single, "CompositeImplicitAutograd")


def made(
    target: str, args: Sequence[Any], shapes: Sequence[Shape], results: Sequence[Shape], ints: int
) -> tuple[Op, dict[str, Tensor]]:
    """An op of torch with ``shapes`` operands, of which the one at ``ints`` holds integers."""
    tensors = {
        f"x{i}": Tensor(f"x{i}", s, "int64" if i == ints else "float32", differentiable=i != ints)
        for i, s in enumerate(shapes)
    }
    tensors |= {
        f"y{i}": Tensor(f"y{i}", s, "float32", differentiable=True) for i, s in enumerate(results)
    }
    space, name, _ = target.split(".")
    op = Op(
        f"{space}::{name}",
        tuple(n for n in tensors if n[0] == "x"),
        tuple(n for n in tensors if n[0] == "y"),
        {"torch": {"target": target, "args": list(args), "kwargs": {}}},
        Source("mixer", "model.py", 3),
    )
    return op, tensors


def verdict(op: Op, tensors: dict[str, Tensor], rule: Rule) -> Verdict:
    bound = bind_rule(
        rule, [tensors[n].shape for n in op.inputs], [tensors[n].shape for n in op.outputs]
    )
    return try_rule(op, tensors, bound, EXECUTE)


X, ROW = (4, 6, 8), (4, 6)
CASES = [
    ("aten.hypot.default", ["%0", "%1"], [X, X], [X], -1, "..., ... -> ...", True),
    ("aten.roll.default", ["%0", [1], [1]], [X], [X], -1, "b s! d -> b s! d", True),
    ("aten.roll.default", ["%0", [1], [1]], [X], [X], -1, "b s d -> b s d", False),
    ("aten.roll.default", ["%0", [1], [2]], [X], [X], -1, "b s d -> b s d", False),
    ("aten.logcumsumexp.default", ["%0", 1], [X], [X], -1, "b s! d -> b s! d", True),
    ("aten.logcumsumexp.default", ["%0", 1], [X], [X], -1, "b s d -> b s d", False),
    ("aten.sum.dim_IntList", ["%0", [2]], [X], [ROW], -1, "b s d+ -> b s", True),
    ("aten.amax.default", ["%0", [2]], [X], [ROW], -1, "b s d+ -> b s", False),
    ("aten.amax.default", ["%0", [2]], [X], [ROW], -1, "b s d! -> b s", True),
    ("aten.mean.dim", ["%0", [2]], [X], [ROW], -1, "b s d+ -> b s", False),
    ("aten.cdist.default", ["%0", "%1"], [ROW, (5, 6)], [(4, 5)], -1, "a k!, b k! -> a b", True),
    ("aten.cdist.default", ["%0", "%1"], [ROW, (5, 6)], [(4, 5)], -1, "a k+, b k+ -> a b", False),
    ("aten.bmm.default", ["%0", "%1"], [X, (4, 8, 6)], [(4, 6, 6)], -1,
     "b m k+, b k+ n -> b m n", True),
    ("aten.gather.default", ["%0", 1, "%1"], [ROW, ROW], [ROW], 1, "a b!, a b! -> a b!", True),
    ("aten.gather.default", ["%0", 1, "%1"], [ROW, ROW], [ROW], 1, "a b, a b -> a b", False),
    ("aten.flip.default", ["%0", [0]], [X], [X], -1, "b s d -> b s d", False),
    ("aten.matrix_exp.default", ["%0"], [(6, 4, 4)], [(6, 4, 4)], -1, "b s d -> b s d", False),
    ("aten.std.default", ["%0"], [(8,)], [()], -1, "b+ -> ", False),
    ("trial.averaging.default", ["%0"], [X], [X], -1, "b s d -> b s d", False),
    ("trial.averaging.default", ["%0"], [X], [X], -1, "b! s d -> b! s d", True),
    ("trial.refusing.default", ["%0"], [X], [X], -1, "b s d -> b s d", None),
    ("trial.noisy.default", ["%0"], [X], [X], -1, "b s d -> b s d", None),
    ("trial.single.default", ["%0"], [X], [X], -1, "b s d -> b s d", False),
    ("trial.single.default", ["%0"], [X], [X], -1, "b s d! -> b s d!", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "args", "shapes", "results", "ints", "rule", "holds"),
    [pytest.param(*c, id=f"{c[0].split('.')[1]} {c[5]}") for c in CASES],
)
def test_rules_are_told_right_from_wrong(
    target: str,
    args: list[Any],
    shapes: list[Shape],
    results: list[Shape],
    ints: int,
    rule: str,
    holds: bool | None,
) -> None:
    outcome = verdict(*made(target, args, shapes, results, ints), Rule(rule))
    assert outcome.holds is holds, outcome.reason
    assert bool(outcome.reason) is (holds is not True)


@pytest.mark.parametrize(("name", "holds"), [("neg", True), ("exp", False)])
def test_linear_is_tried(name: str, holds: bool) -> None:
    rule = Rule("... -> ...", linear=True)
    outcome = verdict(*made(f"aten.{name}.default", ["%0"], [X], [X], -1), rule)
    assert outcome.holds is holds
    assert holds or "not linear" in outcome.reason


def test_large_ops_are_tried_on_halved_extents() -> None:
    shape = (1 << 10, 1 << 9, 1 << 9)
    assert 2 * torch.Size(shape).numel() > 16 * MOST_ELEMENTS
    op = made("aten.roll.default", ["%0", [1], [1]], [shape], [shape], -1)
    assert verdict(*op, Rule("b s! d -> b s! d")).holds is True
    assert verdict(*op, Rule("b s d -> b s d")).holds is False


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for kind in ("aten::roll", "aten::rol", "trial::refusing"):
        unregister(kind)


def graph_of(made: tuple[Op, dict[str, Tensor]]) -> Graph:
    op, tensors = made
    return Graph(tensors, (op,), op.inputs, op.outputs)


ROLL = ("aten.roll.default", ["%0", [1], [1]], [X], [X], -1)


def test_a_wrong_rule_of_the_user_is_refused_with_its_place() -> None:
    autopar.register_rule("aten::roll", "b s d -> b s d")
    with pytest.raises(RuleError) as caught:
        check_registered(graph_of(made(*ROLL)), EXECUTE)
    text = str(caught.value)
    assert "'b s d -> b s d' registered for 'aten::roll'" in text
    assert "mixer (model.py:3)" in text
    assert "split 2 ways over s" in text


def test_a_right_rule_passes_without_a_word() -> None:
    autopar.register_rule("aten::roll", "b s! d -> b s! d")
    assert check_registered(graph_of(made(*ROLL)), EXECUTE) == []


def test_a_rule_for_no_op_is_told_with_the_name_that_was_meant() -> None:
    autopar.register_rule("aten::rol", "b s! d -> b s! d")
    (note,) = check_registered(graph_of(made(*ROLL)), EXECUTE)
    assert "'aten::rol' is for no op of this model" in note
    assert "Did you mean aten::roll?" in note


def test_a_rule_that_cannot_be_tried_is_told_with_the_reason() -> None:
    autopar.register_rule("trial::refusing", "b s d -> b s d")
    op = made("trial.refusing.default", ["%0"], [X], [X], -1)
    (note,) = check_registered(graph_of(op), EXECUTE)
    assert "needs an accelerator" in note
    assert "mixer (model.py:3)" in note


@pytest.mark.parametrize(
    ("op", "example"),
    [
        (("aten.hypot.default", ["%0", "%1"], [X, X], [X], -1), "a b c, a b c -> a b c"),
        (("aten._softmax.default", ["%0", 1, False], [X], [X], -1), "a b! c -> a b! c"),
        (("aten.flip.default", ["%0", [0]], [X], [X], -1), ""),
        (("aten.renorm.default", ["%0", 2, 1, 1.0], [X], [X], -1), ""),
        (("trial.refusing.default", ["%0"], [X], [X], -1), ""),
        (
            ("aten._cdist_forward.default", ["%0", "%1", 2.0, None], [X, X], [(4, 6, 6)], -1),
            "a b! d!, a b! d! -> a b! c!",
        ),
    ],
    ids=lambda v: v[0] if isinstance(v, tuple) else None,
)
def test_a_rule_is_shown_as_an_example_only_where_it_held(op: Any, example: str) -> None:
    graph = graph_of(made(*op))
    (kind,) = {o.kind for o in graph.ops}
    text = unruled(graph, EXECUTE)[kind]
    shown = text.partition(f"register_rule({kind!r}, '")[2].partition("')")[0]
    assert shown == example
    with pytest.raises(UnruledOp, match="--allow-replicated"):
        check_allowed(graph, {kind: text}, ())
