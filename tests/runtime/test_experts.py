"""Mixtures of experts over real processes: state that is split, pipelines, recomputation."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.experts import MODELS, PLANS
from benchmarks.zoo import check, right
from tests.sampling import some

TRIED = {
    "mixtral": (
        "shard, ZeRO 3",
        "pp x replicate, microbatches",
        "shard x tp, ZeRO 3, microbatches, recompute full",
    ),
    f"{MODELS}:gpt_oss_partly_used": ("shard, ZeRO 2, recompute selective-op",),
    f"{MODELS}:mixtral_padded": ("shard, ZeRO 3",),
}


@pytest.mark.gloo
@pytest.mark.parametrize("model", TRIED)
def test_programs_compute_what_the_library_does(model: str, tmp_path: Path) -> None:
    """In float64, against its own loop over experts; collectives are those that were priced."""
    names = some(TRIED[model], 1)
    rows = check(model, tmp_path, {name: PLANS[name] for name in names})
    assert len(rows) == len(names)
    assert [row for row in rows if not right(row)] == []
