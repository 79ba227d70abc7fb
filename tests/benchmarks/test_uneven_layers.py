"""What a mix of two plans takes at least."""

from __future__ import annotations

import pytest

from benchmarks.uneven_layers import Point, mixed_s

FAST, LEAN, LEANEST = Point(1.0, 100), Point(2.0, 60), Point(4.0, 20)


@pytest.mark.parametrize(
    ("limit", "least_s"),
    [(100, 1.0), (80, 1.5), (60, 2.0), (40, 3.0), (20, 4.0), (10, float("inf"))],
)
def test_a_mix_lies_on_a_line(limit: int, least_s: float) -> None:
    assert mixed_s([FAST, LEAN, LEANEST], limit) == pytest.approx(least_s)


def test_a_plan_above_a_line_is_no_part_of_the_mix() -> None:
    assert mixed_s([FAST, Point(3.5, 60), LEANEST], 60) == pytest.approx(2.5)
