"""Putting probed pieces together, and naming the first difference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch.probe import probe, recording
from autopar.runtime.shared.seen import Seen
from autopar.runtime.verify.differences import Whole, assemble, first_difference, place_of

MESH = Mesh(("dp_shard", "tp"), (2, 2))
WHOLE = torch.arange(24.0).reshape(4, 6)


def seen(
    sharding: str, pieces: list[torch.Tensor], gradients: list[torch.Tensor]
) -> list[list[Seen]]:
    return [[Seen("x", sharding, v, g)] for v, g in zip(pieces, gradients, strict=True)]


def quarters(t: torch.Tensor) -> list[torch.Tensor]:
    return [p for half in t.chunk(2, 0) for p in half.chunk(2, 1)]


CASES = {
    "split twice": ("dp_shard:S0 tp:S1", quarters(WHOLE), quarters(WHOLE)),
    "outer axis first": ("dp_shard:S0 tp:S0", list(WHOLE.chunk(4)), list(WHOLE.chunk(4))),
    "partial sum": (
        "dp_shard:S0 tp:P",
        [p for half in WHOLE.chunk(2) for p in (half - 1, torch.ones_like(half))],
        [p for half in WHOLE.chunk(2) for p in (half, half)],
    ),
    "deferred gradient": (
        "dp_shard:S0 tp:D",
        [p for half in WHOLE.chunk(2) for p in (half, half)],
        [p for half in WHOLE.chunk(2) for p in (half - 1, torch.ones_like(half))],
    ),
    "whole": ("R", [WHOLE] * 4, [WHOLE] * 4),
}


@pytest.mark.parametrize("case", CASES)
def test_pieces_of_ranks_make_the_whole(case: str) -> None:
    (whole,) = assemble(seen(*CASES[case]), MESH, 1)
    assert np.array_equal(whole.value, WHOLE)
    assert whole.gradient is not None
    assert np.array_equal(whole.gradient, WHOLE)
    assert whole.disagree == ""


def test_microbatches_are_the_outermost_cut() -> None:
    rows = WHOLE.chunk(4)  # microbatch 0 on both ranks, then microbatch 1
    ranks = [
        [Seen("x", "microbatch:S0 dp_shard:S0", rows[m * 2 + r]) for m in range(2)]
        for r in range(2)
    ]
    (whole,) = assemble(ranks, Mesh(("dp_shard",), (2,)), 2)
    assert np.array_equal(whole.value, WHOLE)


def test_copies_that_differ_are_told() -> None:
    ranks = [[Seen("x", "R", WHOLE)], [Seen("x", "R", WHOLE + 1)]]
    (whole,) = assemble(ranks, Mesh(("tp",), (2,)), 1)
    assert whole.disagree == "value"
    ranks = [[Seen("x", "R", WHOLE, WHOLE)], [Seen("x", "R", WHOLE, WHOLE + 1)]]
    (whole,) = assemble(ranks, Mesh(("tp",), (2,)), 1)
    assert whole.disagree == "gradient"
    difference = first_difference([Whole("x", 0, WHOLE, WHOLE)], [whole])
    assert difference is not None
    assert "ranks that should agree do not" in difference.text()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_any_dtype_is_put_together(dtype: torch.dtype) -> None:
    whole = (WHOLE % 2).to(dtype)
    for other, disagree in ((whole, ""), (1 - whole.int(), "value")):
        ranks = [[Seen("x", "R", whole)], [Seen("x", "R", other.to(dtype))]]
        (joined,) = assemble(ranks, Mesh(("tp",), (2,)), 1)
        assert joined.disagree == disagree
        difference = first_difference([Whole("x", 0, other.to(dtype), None)], [joined])
        assert (difference is not None) == bool(disagree)


def test_ranks_with_other_probes_are_refused() -> None:
    with pytest.raises(ValueError, match="same probes"):
        assemble([[Seen("x", "R", WHOLE)], [Seen("y", "R", WHOLE)]], Mesh(("tp",), (2,)), 1)


def test_probe_notes_value_and_gradient_only_while_recording() -> None:
    x = torch.ones(2, requires_grad=True)
    assert probe("a", x) is x
    with recording() as results:
        y = probe("y", x * 3)
        (y * y).sum().backward()  # type: ignore[no-untyped-call]
    assert [s.name for s in results] == ["y"]
    assert results[0].value.tolist() == [3, 3]
    assert results[0].gradient is not None
    assert results[0].gradient.tolist() == [6, 6]


def wholes(values: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[Whole]:
    return [Whole("x", i, v, g) for i, (v, g) in enumerate(zip(values, gradients, strict=True))]


def test_forward_comes_before_backward_and_backward_runs_backwards() -> None:
    ones = [torch.ones(3) for _ in range(3)]
    right = wholes(ones, ones)
    assert first_difference(right, right) is None
    off = [torch.ones(3), torch.tensor([1.0, 1.0, 1.5]), torch.ones(3) * 2]
    forward = first_difference(right, wholes(off, off))
    assert forward is not None
    assert (forward.direction, forward.occurrence, forward.index) == ("forward", 1, (2,))
    assert (forward.expected, forward.actual) == (1.0, 1.5)
    backward = first_difference(right, wholes(ones, off))
    assert backward is not None
    assert (backward.direction, backward.occurrence) == ("backward", 2)
    text = backward.text(place_of({"x": ["a (f.py:1)", "b (f.py:1)", "c (f.py:1)"]}, backward))
    assert "backward, x in c (f.py:1): gradient[0] is 2 and should be 1" in text


def test_a_gradient_that_is_zero_in_theory_is_no_difference() -> None:
    big, noise = torch.ones(3), torch.full((3,), 1e-17)
    assert (
        first_difference(wholes([big] * 2, [big, noise]), wholes([big] * 2, [big, -noise])) is None
    )


def test_a_shape_or_a_nan_is_a_difference() -> None:
    difference = first_difference([Whole("x", 0, WHOLE, None)], [Whole("x", 0, WHOLE[:2], None)])
    assert difference is not None
    assert "its shape is [2, 6] and should be [4, 6]" in difference.text()
    broken = WHOLE.clone()
    broken[1, 2] = float("nan")
    difference = first_difference([Whole("x", 0, WHOLE, None)], [Whole("x", 0, broken, None)])
    assert difference is not None
    assert difference.index == (1, 2)
