"""Numbers as people read them."""

from __future__ import annotations

import pytest

from autopar.report.units import count, degrees, duration, percent, size


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0, "0 s"),
        (1.5, "1.50 s"),
        (123.4, "123 s"),
        (0.99999, "1.00 s"),
        (0.0123, "12.3 ms"),
        (4.5e-6, "4.50 us"),
        (3e-9, "3.00 ns"),
        (86_400, "86,400 s"),
    ],
)
def test_duration(time_s: float, text: str) -> None:
    assert duration(time_s) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (80 << 30, "80.0 GiB"), (512, "512 B")],
)
def test_size(size_bytes: int, text: str) -> None:
    assert size(size_bytes) == text


def test_count_and_percent() -> None:
    assert [count(n) for n in (12, 16_600, 8.03e9)] == ["12", "16.6k", "8.03B"]
    assert [percent(r) for r in (0.5, 1.0, 0.1234, 1e-5, 0)] == [
        "50.0 %",
        "100 %",
        "12.3 %",
        "0.001 %",
        "0 %",
    ]


def test_degrees_leaves_out_what_splits_nothing() -> None:
    assert degrees({"dp_replicate": 1, "dp_shard": 32, "tp": 8}) == "dp_shard 32 x tp 8"
    assert degrees({"tp": 1}) == "one device"
