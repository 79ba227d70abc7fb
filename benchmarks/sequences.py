"""Every family of the zoo and every example with sequences split over ranks, as `benchmarks.zoo`.

    python -m benchmarks.sequences [--families llama,t5,examples/02_gpt.py] [--json]

Each is planned for four processes with the tokens of a sample on two or four of them, beside data,
tensor and pipeline ranks, and verified in float64 against one device. What has no tokens (images)
or cannot be split so is a row with the reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show
from benchmarks.zoo import EXAMPLES, LIMIT, check, one_line, right
from benchmarks.zoo_models import ZOO

LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "cp x shard": {"cp": "2", "dp_shard": "2"},
    "cp x tp": {"cp": "2", "tp": "2"},
    "cp 4": {"cp": "4"},
    "cp x shard, ZeRO 3, microbatches, recompute": {
        "cp": "2",
        "dp_shard": "2",
        "zero": "3",
        "microbatch": "1",
        "recompute": "full",
    },
    "cp x tp, recompute compute": {"cp": "2", "tp": "2", "recompute": "compute"},
    "cp x pp": {"cp": "2", "pp": "2"},
}
WITHOUT = ("vit", "resnet", "convnext", "examples/04_resnet.py", "examples/06_unet.py")
"""They have no dim of tokens."""
NOT_YET = ("examples/05_gpt_jax.py",)
"""JAX programs keep sequences whole."""
SCRIPTS = ("examples/07_train_script.py", "examples/08_train_script_jax.py")
"""They have no model of their own file."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    every = [name for name in (*ZOO, *EXAMPLES) if name not in SCRIPTS]
    parser.add_argument("--families", default=",".join(every))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    families = given.families.split(",")
    rows: list[dict[str, Any]] = []
    for family in families:
        with tempfile.TemporaryDirectory() as scratch:
            rows += check(family, Path(scratch), LAYOUTS)
        mine = [row for row in rows if row["family"] == family]
        print(f"{family}: {sum(map(right, mine))} of {len(mine)}", file=sys.stderr, flush=True)
    verified = [row for row in rows if "loss" in row]
    worst = max((max(r["loss"], r["gradient"], r["weight"]) for r in verified), default=0.0)
    refused = [r for r in rows if "loss" not in r and r["family"] not in (*WITHOUT, *NOT_YET)]
    targets = [
        Target("largest relative error in float64", worst, LIMIT),
        Target("plans that are wrong", sum(not right(row) for row in verified), 0),
        Target("refused, of models with tokens", len(refused), 0),
    ]
    show(rows if given.json else [one_line(f, rows) for f in families], targets, given.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
