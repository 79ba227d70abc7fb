"""Choices pinned on a T5 and a mixture of experts, verified; which rows a sample takes, and what a
row says that is not right."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from benchmarks import verified_choices
from benchmarks.verified_choices import CHOICES, LAYOUTS, MODELS, Case, checked, drawn, known, lines
from tests.sampling import some

VERIFIED = (
    Case("t5", "fp8-block", "shard x tp, ZeRO 3"),
    Case("t5", "chunks, pieces, prefetch 2", "shard x tp, ZeRO 3"),
    Case("mixture", "2 pieces", "zb-h1 x tp"),
    Case("mixture", "mxfp8", "tp 4"),
)


@pytest.mark.gloo(4)
def test_choices_that_are_there_are_right(tmp_path: Path) -> None:
    cases = some(VERIFIED, 2)
    rows = checked(cases, tmp_path, None)
    assert [(row["outcome"], row["reason"]) for row in rows] == [("right", "")] * len(cases)


def test_what_is_not_verified_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crashes(*_: object) -> None:
        raise ZeroDivisionError("planned")

    cases = [Case("gpt", "prefetch 2", "tp 4"), Case("gpt", "two levels", "1f1b x tp")]
    refused = checked(cases, tmp_path, None)
    monkeypatch.setattr(verified_choices, "write_plan", crashes)
    crashed = checked(cases[:1], tmp_path, None)
    monkeypatch.setattr(verified_choices, "write_plan", lambda *_: None)
    monkeypatch.setattr(verified_choices, "read_plan", lambda _: _Plan())
    without = checked([Case("gpt", "2 chunks", "tp 4")], tmp_path, None)
    outcomes = [row["outcome"] for row in (*refused, *crashed, *without)]
    assert outcomes == ["refused", "refused", "crashed", "refused otherwise"]
    assert known(refused[0]["reason"])
    assert not known("--fix bucket=1MiB: this layout keeps parameters whole")
    shown = {line["choice"]: (line["refused"], line["why"]) for line in lines(refused)}
    assert shown["gpt, prefetch 2"][0] == 1
    assert "this layout keeps parameters whole" in shown["gpt, prefetch 2"][1]
    assert shown["gpt, two levels"][1].startswith("this layout has 2 stages")


class _Plan:
    loss_chunks = None


def test_a_sample_has_every_choice_of_every_model_before_one_twice() -> None:
    every = [Case(*words) for words in product(MODELS, CHOICES, LAYOUTS)]
    for seed in range(3):
        cases = drawn(every, seed)
        assert sorted(map(str, cases)) == sorted(map(str, every))
        first = {(case.model, case.choice) for case in cases[: len(MODELS) * len(CHOICES)]}
        assert len(first) == len(MODELS) * len(CHOICES)
    assert drawn(every, 1) != drawn(every, 2)


def test_recomputation_takes_turns() -> None:
    for choice in CHOICES:
        policies = {Case("gpt", choice, layout).pins["recompute"] for layout in LAYOUTS}
        assert len(policies) == 3
