"""A loss over alignments, on real processes: samples over data ranks, stages, microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.zoo import check, right

PLANS = {
    "tp x shard": {"tp": "2", "dp_shard": "2"},
    "pp x replicate, microbatches": {"pp": "2", "dp_replicate": "2", "microbatch": "2"},
}


@pytest.mark.gloo
def test_programs_compute_the_loss_of_every_alignment(tmp_path: Path) -> None:
    rows = check("tests/runtime/speech.py:Speech", tmp_path, PLANS)
    assert [row["plan"] for row in rows] == list(PLANS)
    assert [row for row in rows if not right(row)] == []
