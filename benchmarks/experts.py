"""Mixtures of experts of transformers under many plans, verified against the library's own loop.

In float64, over real processes, with the collectives of every rank compared with what was priced.

    python -m benchmarks.experts [--families mixtral,gpt_oss] [--keep DIR] [--json]

Each family is planned for four processes: data axes under every ZeRO level, tensor parallelism,
pipelines, microbatches, recomputation, and the planner's own choice. Models with a loss for balance
are of the whole batch: those are planned without microbatches. Some have experts without tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show
from benchmarks.zoo import LIMIT, check, right
from benchmarks.zoo_models import EXPERTS

MODELS = "benchmarks/expert_models.py"
WHOLE = ("mixtral_balanced", "olmoe_balanced", "qwen2_moe_balanced", "mixtral_padded")
PARTLY = ("gpt_oss_partly_used", "deepseek_v3_partly_used")
UNLISTED = ("dbrx", "llama4", "longcat")
OF_THE_WHOLE_BATCH: Mapping[str, Mapping[str, str]] = {
    "replicate": {"dp_replicate": "4"},
    "shard, ZeRO 3": {"dp_shard": "4", "zero": "3"},
    "replicate x tp": {"dp_replicate": "2", "tp": "2"},
    "tp": {"tp": "4"},
    "the planner's own": {},
}
PLANS: Mapping[str, Mapping[str, str]] = {
    **OF_THE_WHOLE_BATCH,
    "shard, ZeRO 1, microbatches": {"dp_shard": "4", "zero": "1", "microbatch": "1"},
    "shard, ZeRO 2, recompute selective-op": {
        "dp_shard": "4",
        "zero": "2",
        "recompute": "selective-op",
    },
    "shard x tp, ZeRO 3, microbatches, recompute full": {
        "dp_shard": "2",
        "tp": "2",
        "zero": "3",
        "microbatch": "1",
        "recompute": "full",
    },
    "pp x replicate, microbatches": {"pp": "2", "dp_replicate": "2", "microbatch": "1"},
    "pp x shard, ZeRO 3, recompute compute": {
        "pp": "2",
        "dp_shard": "2",
        "zero": "3",
        "recompute": "compute",
    },
    "zb-h1 x tp": {"pp": "2", "tp": "2", "schedule": "zb-h1", "microbatch": "2"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", default=",".join((*EXPERTS, *WHOLE, *PARTLY, *UNLISTED)))
    parser.add_argument("--keep", type=Path, help="where plans and programs stay")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for family in given.families.split(","):
            start = time.perf_counter()
            folder = (given.keep or Path(scratch)) / family
            model = family if family in EXPERTS else f"{MODELS}:{family}"
            plans = OF_THE_WHOLE_BATCH if family in WHOLE else PLANS
            rows += [row | {"family": family} for row in check(model, folder, plans)]
            mine = [row for row in rows if row["family"] == family]
            print(
                f"{family}: {sum(map(right, mine))} of {len(mine)} plans right, "
                f"{time.perf_counter() - start:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    wrong = [row for row in rows if not right(row)]
    worst = max(row.get(n, 1.0) for row in rows for n in ("loss", "gradient", "weight"))
    targets = [
        Target("plans that are refused or wrong", len(wrong), 0),
        Target("largest relative error in float64", worst, LIMIT),
    ]
    show(rows if given.json else wrong or rows, targets, given.json)


if __name__ == "__main__":
    main()
