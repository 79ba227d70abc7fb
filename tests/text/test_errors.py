"""A text that cannot be read is refused with its line, and with what was expected there."""

from __future__ import annotations

import re

import pytest

from autopar.files import plan_text
from autopar.files.plan_checks import BadPlan
from autopar.lowering import text as lowered_text
from autopar.nouns.errors import UserError
from autopar.nouns.text import graph as graph_text
from autopar.nouns.text.lines import TextError
from tests import plans
from tests.text import golden, reading_lowered, reading_plans

GRAPH = """\
graph x -> y
  block Layer x 2, layers.{0..1}: h -> out
    input h : float32[4, 8] grad
    out = relu(h) : output float32[4, 8] grad
  input x : float32[4, 8]
  layers.0/block = block(x; block="Layer", instance="layers.0") : float32[4, 8] grad
  for i in 1..1
    layers.{i}/block = block(layers.{i-1}/block; block="Layer", instance="layers.{i}") : float32[4]
  y = sum(layers.1/block; dims=[0, 1]) : output float32[] grad @ top (Net) net.py:7 ~ aten.sum("%0")
"""
LOWERED = """\
lowered x -> y
  on dp_shard=2 x tp=2
  input x : float32[4, 8] grad dp_shard:S0
  h = relu(x) : float32[4, 8] grad dp_shard:S0 tp:S1 by dp_shard:e0 tp:e1 [e0~ e1~ -> e0~ e1~]
    reads x as dp_shard:S0 tp:S1 grad: tp R->S1 slice/all_gather [2, 8]
    shares h as dp_shard:S0: tp S1->R all_gather/slice [2, 4]
  y = sum(h; dims=[0, 1], keepdim=false) : output float32[] grad dp_shard:P by dp_shard:a [a+ b+ ->]
  returns y as dp_shard:P grad
"""


def test_the_texts_are_right_before_they_are_broken() -> None:
    graph = graph_text.from_text(GRAPH)
    assert [op.name for op in graph.ops] == ["layers.0/block", "layers.1/block", "y"]
    lowered = reading_lowered.from_text(LOWERED)
    assert lowered_text.to_text(lowered) + "\n" == LOWERED


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("graph x -> y", "graf x -> y", 1, "'graph'"),
        ("graph x -> y", "graph x, -> y", 1, "an input"),
        ("graph x -> y", "graph x y", 1, "'->'"),
        ("graph x -> y", "graph x -> z", 1, "'z' among the values below"),
        ("x 2, layers", "times 2, layers", 2, "'x'"),
        ("x 2, layers", "x 3, layers", 2, "3 module paths, not 2"),
        ("{0..1}: h", "{0..1} h", 2, "':'"),
        ("  input h", "  weight h", 3, "an op as in 'y = relu(x) : ...', block, for, or parameter"),
        ("h : float32", "h : float31", 3, "a dtype of bool, uint8"),
        ("[4, 8] grad\n    out", "[4, b] grad\n    out", 3, "a size"),
        ("[4, 8] grad\n    out", "[4, 8 grad\n    out", 3, "']'"),
        ("[4, 8] grad\n    out", "[4, 8] gradient\n    out", 3, "the end of the line"),
        ("relu(h)", "relu(g)", 4, "a value that is declared or made above"),
        ("relu(h)", "relu(h", 4, "')'"),
        ("out = relu", "h = relu", 4, "a new name: 'h' is taken"),
        ("relu(h) :", "relu(h)", 4, "':'"),
        ("1..1", "1-1", 7, "'..'"),
        ("1..1", "1..", 7, "the last number"),
        ("[0, 1])", "[0, 1)", 9, "a JSON value"),
        ("dims=", "dims:", 9, "'='"),
        ("net.py:7", "net.py:", 9, "a line"),
        ("(Net)", "(Net", 9, "')'"),
        ('"%0")', '"%0)', 9, "a JSON value"),
        ("  y = sum", "      y = sum", 9, "a line that is not deeper than the one above"),
        ("  y = sum", "y = sum", 9, "the end of the text, or a line that is indented"),
    ],
)
def test_a_broken_graph(old: str, new: str, line: int, expected: str) -> None:
    assert GRAPH.count(old) == 1
    with pytest.raises(TextError, match=rf"^line {line}, column \d+: ") as error:
        graph_text.from_text(GRAPH.replace(old, new))
    assert f"expected {expected}" in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("  on dp_shard=2 x tp=2\n", "", 1, "'on' and a mesh in the line below"),
        ("on dp_shard=2 x tp=2", "on four devices", 2, "a mesh as in dp_shard=2 x tp=2, or 1"),
        ("grad dp_shard:S0\n", "grad\n", 3, "a sharding as in tp:S0, or R"),
        (" by dp_shard:e0 tp:e1", "", 4, "the end of the line"),
        ("tp:e1 [e0~", "tp:e1 [e9~", 4, "the rule of relu, which is e0~ e1~ -> e0~ e1~"),
        ("h = relu", "h = foo", 4, "an op whose rule is known"),
        ("by dp_shard:e0 tp:e1", "by e0", 4, "a strategy as in tp:n, or whole"),
        ("reads x as", "reads h as", 5, "an operand of the op above, x"),
        ("reads x as", "shows x as", 5, "shares, or reads or runs below an op"),
        ("reads x as dp", "reads x dp", 5, "'as'"),
        ("tp R->S1", "cp R->S1", 5, "an axis of dp_shard=2 x tp=2"),
        ("tp R->S1", "tp R->Q1", 5, "one of R, D, P, S<dim>"),
        ("slice/all", "slice,all", 5, "'/'"),
        ("shares h as", "shares g as", 6, "a value of this graph"),
        ("returns y as dp_shard:P", "returns y as split", 8, "a sharding as in tp:S0, or R"),
    ],
)
def test_a_broken_lowered(old: str, new: str, line: int, expected: str) -> None:
    assert LOWERED.count(old) == 1
    with pytest.raises(TextError, match=rf"^line {line}, column \d+: ") as error:
        reading_lowered.from_text(LOWERED.replace(old, new))
    assert f"expected {expected}" in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (", 4096 bytes", ", 4095 bytes", "'runs all_reduce over tp, 4096 bytes, forward'"),
        ("    runs all_reduce over tp, 4096 bytes, forward\n", "", "'runs all_reduce over tp, 40"),
        (
            "  returns",
            "    runs all_reduce over tp, 8 bytes, forward\n  returns",
            "no more of what",
        ),
    ],
)
def test_collectives_that_the_rule_does_not_give(old: str, new: str, expected: str) -> None:
    text = (golden.FOLDER / "gpt_torch.lowered.txt").read_text()
    at = text.rindex(old)
    with pytest.raises(TextError, match=r"^line \d+, column \d+: ") as error:
        reading_lowered.from_text(text[:at] + new + text[at + len(old) :])
    assert f"expected {expected}" in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("plan\n", "plans\n", TextError, "line 1, column 1: expected 'plan'"),
        (
            "microbatches 1\n",
            "microbatches one\n",
            TextError,
            "expected a JSON value, there is one",
        ),
        ("microbatches 1\n", "microbatches 0\n", BadPlan, "microbatches is 0; allowed: a whole"),
        ("  microbatches 1\n", "", BadPlan, "microbatches: missing"),
        ("  style", "  framework 3\n  style", TextError, "expected framework once, not twice"),
        ("zero=2", "zero 2", TextError, "expected '='"),
        ("zero=2", "zero=7", BadPlan, "stages[0].zero is 7; allowed: 0 or 1 or 2 or 3"),
        ("on dp_shard=2", "over dp_shard=2", TextError, "expected 'on'"),
        ("on dp_shard=2 x tp=2", "on dp_shard=2 x zp=2", BadPlan, "spreads[0].mesh is"),
        ("shared block", "shard block", TextError, "expected op or shared or parameter"),
        (" tp:k", "", TextError, "expected a strategy as in tp:n, or a sharding as in tp:S0"),
        ("  style", "    style", TextError, "expected a line that is not deeper"),
    ],
)
def test_a_broken_plan(old: str, new: str, error: type[UserError], message: str) -> None:
    text = plan_text.to_text(plans.plan())
    assert text.count(old) == 1
    with pytest.raises(error, match=re.escape(message)):
        reading_plans.from_text(text.replace(old, new))


@pytest.mark.parametrize("text", ["", "# only said\n", "\n\n"])
def test_no_text(text: str) -> None:
    for read in (graph_text.from_text, reading_lowered.from_text, reading_plans.from_text):
        with pytest.raises(TextError, match="line 1, column 1: expected"):
            read(text)


def test_comments_say_nothing() -> None:
    lines = [line for row in GRAPH.split("\n") for line in (f"    # {row}", row)]
    assert graph_text.from_text("\n".join(lines)) == graph_text.from_text(GRAPH)
