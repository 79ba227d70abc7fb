"""Hand-written derivatives that are split as their own ops allow, and those that must not be."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-call, no-any-return"
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.frontends.pytorch.execute import execute
from autopar.nouns.graph import Op
from autopar.nouns.graph import Tensor as Described
from autopar.planner.ask.unruled import unruled
from autopar.rules.own_functions import FUNCTION, LINEAR, RULE
from autopar.rules.registry import rule_for
from tests.emit import own_functions as own
from tests.emit.harness import capture_of
from tests.emit.test_own_functions import B, Body, D, Model, apply, batch, compared, rules


def _hidden(h: Tensor) -> Tensor:
    return h.detach() > 1


def _nearest(m: Any, h: Tensor) -> Tensor:
    pairs = torch.stack([h, h.sin()], 1)
    codes, number = own.Nearest.apply(pairs, m.last.weight)
    return codes.sum(1) + 0.1 * number.view(-1, 2).sum(1, keepdim=True)


SPLIT: dict[str, tuple[Body, str]] = {
    "linear": (
        lambda m, h: own.Linear.apply(h, m.last.weight, m.last.bias),
        "a b!, c b!, c -> a c",
    ),
    "linear without bias": (
        lambda m, h: own.Linear.apply(h, m.last.weight, None),
        "a b!, c b! -> a c",
    ),
    "layer norm": (lambda m, h: own.LayerNorm.apply(h, m.weight, 1e-5), "a b!, b! -> a b!"),
    "rms norm": (apply(own.RMSNorm), "a b! -> a b!"),
    "cross entropy": (
        lambda m, h: h * own.CrossEntropy.apply(h, h.argmax(-1))[:, None],
        "a b!, a -> a",
    ),
    "masked softmax": (
        lambda m, h: own.MaskedSoftmax.apply(h, _hidden(h)),
        "a b!, a b! -> a b!",
    ),
    "nearest": (_nearest, "a b! c!, d! c! -> a b! c!, (a a_2=2!)"),
    "heads of a width": (apply(own.ByHeads, -1, 3), "a (b b_3=3!) -> a (b b_3=3!)"),
    "so many heads": (apply(own.ByHeads, 2, -1), "a (b! b_3=3!) -> a (b! b_3=3!)"),
    "rows clipped": (apply(own.RowsClipped, 1e-3), "a b! -> a b!"),
    "summed bias": (lambda m, h: own.SummedBias.apply(h, m.last.bias), "a b!, b! -> a b!"),
}

WHOLE: dict[str, tuple[Body, str]] = {
    "statistics of the batch": (apply(own.Whitened), "a! b -> a! b"),
    "the largest of all rows": (apply(own.TopRow), "a! b -> a! b"),
    "a size read in backward": (apply(own.ByBatch), "a! b -> a! b"),
    "a mean over rows in backward": (
        lambda m, h: own.AnyOfTwo.apply(h)[0],
        "",
    ),
    "rows as an argument": (apply(own.ByRows, 8), ""),
    "a size as a number": (apply(own.OverRows), ""),
    "a size in a condition": (apply(own.FewRows), ""),
    "rows cut to a size": (lambda m, h: own.RowWeights.apply(h, m.rows), ""),
    "row numbers": (apply(own.RowNumbers), ""),
    "a sum that every row gets": (apply(own.Shifted), ""),
    "a mean as gradient": (lambda m, h: own.AveragedBias.apply(h, m.last.bias), ""),
    "a sum clipped": (lambda m, h: own.ClippedBias.apply(h, m.last.bias), ""),
    "a sum and more": (lambda m, h: own.DecayedBias.apply(h, m.last.bias), ""),
    "every entry": (apply(own.Everything), ""),
    "another at every call": (apply(own.Counted), ""),
}
"""Empty where no dim is left that may be split."""


class Wide(Model):
    """With a weight of every row."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.register_buffer("rows", torch.linspace(0.5, 2.0, 12))


def functions(body: Body) -> list[Op]:
    graph = capture_of(lambda: Wide(body), batch).graph
    return [op for op in graph.ops if FUNCTION in op.attrs]


def renamed(text: str) -> str:
    """A rule with its indices called a, b, c in order."""
    names = dict.fromkeys(re.findall(r"\bi\d+", text.replace("_", " ")))
    for letter, name in zip("abcdefgh", names, strict=False):
        text = re.sub(rf"\b{name}(?=\b|_)", letter, text)
    return text


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.some(5)
def test_split_as_its_ops_allow(name: str) -> None:
    body, text = SPLIT[name]
    assert [renamed(op.attrs[FUNCTION][RULE]) for op in functions(body)] == [text]
    for seed, mesh in enumerate(("dp_shard=2 x tp=2", "dp_shard=1 x tp=2", "dp_shard=4")):
        assert "own_function(" in compared(body, mesh, seed, 1 + seed % 2)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_where_entries_meet(name: str) -> None:
    body, text = WHOLE[name]
    (op,) = functions(body)
    assert renamed(op.attrs[FUNCTION][RULE]) == text
    missing = unruled(capture_of(lambda: Wide(body), batch).graph, execute)
    assert (op.kind in missing) == (not text)


@pytest.mark.parametrize("name", [n for n, (_, text) in WHOLE.items() if text])
def test_its_other_dims_are_split(name: str) -> None:
    """What no axis may split is the batch here: every data rank gathers it."""
    for seed in range(3):
        compared(WHOLE[name][0], "tp=2", seed, batched=False)
        compared(WHOLE[name][0], "dp_shard=2 x tp=2", seed)


def test_rows_clipped_want_their_whole_gradient() -> None:
    """Ranks that split no row have shares of a weight's gradient, which add up before."""

    def body(m: Any, h: Tensor) -> Tensor:
        return F.linear(h, own.RowsClipped.apply(m.last.weight, 1e-3))

    (op,) = functions(body)
    assert not op.attrs[FUNCTION][LINEAR]
    for seed in range(3):
        assert "whole_gradient=True" in compared(body, "tp=2", seed, batched=False)
        compared(body, "dp_shard=2", seed)


def test_a_registered_rule_comes_first() -> None:
    (op,) = functions(SPLIT["rms norm"][0])
    tensors = {n: Described(n, (B, D), "float32") for n in (*op.inputs, *op.outputs)}
    with rules({"RMSNorm": "b! c! -> b! c!"}):
        assert rule_for(op, tensors).text == "b! c! -> b! c!"
    assert renamed(rule_for(op, tensors).text) == "a b! -> a b!"
