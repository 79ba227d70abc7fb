"""Every family of the zoo and every example with sequences split over ranks, as `benchmarks.zoo`.

    python -m benchmarks.sequences [--families llama,t5,examples/02_gpt.py] [--plans "cp 4;ep"]
                                   [--ranks 8] [--json]

Each is planned for four processes (or eight: ``--ranks 8``) with the tokens of a sample on two or
four of them, beside data, tensor and pipeline ranks, those with experts also with experts on ranks
of other axes, and verified in float64 against one device. What has no tokens (images) or cannot be
split so is a row with the reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show
from benchmarks.planned import CLUSTER
from benchmarks.zoo import EXAMPLES, LIMIT, check, one_line, right
from benchmarks.zoo_models import EXPERTS, FAMILIES, MORE

LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "cp x shard": {"cp": "2", "dp_shard": "2"},
    "cp x tp": {"cp": "2", "tp": "2"},
    "cp x tp2": {"cp": "2", "tp2": "2"},
    "tp2 x tp": {"tp2": "2", "tp": "2"},
    "cp 4": {"cp": "4"},
    "rows x heads": {"cp_ring": "2", "cp_head": "2"},
    "ring over two levels": {"cp_ring": "4", "cp_outer": "2"},
    "heads 4": {"cp_head": "4"},
    "cp 4, ZeRO 3, microbatches, recompute": {
        "cp": "4",
        "zero": "3",
        "microbatch": "1",
        "recompute": "full",
    },
    "cp x shard, ZeRO 3, microbatches, recompute": {
        "cp": "2",
        "dp_shard": "2",
        "zero": "3",
        "microbatch": "1",
        "recompute": "full",
    },
    "cp x tp, recompute compute": {"cp": "2", "tp": "2", "recompute": "compute"},
    "cp x pp": {"cp": "2", "pp": "2"},
    "cp x pp, ZeRO 2": {"cp": "2", "pp": "2", "zero": "2"},
}
EXPERTS_TOO: Mapping[str, Mapping[str, str]] = {
    "ep": {"ep": "4", "dp_shard": "4"},
    "ep x tp2": {"ep": "2", "tp2": "2"},
    "ep over shard and tp2": {"ep": "4", "dp_shard": "2", "tp2": "2"},
    "ep x cp": {"ep": "2", "dp_shard": "2", "cp": "2"},
    "ep over shard and cp": {"ep": "4", "dp_shard": "2", "cp": "2"},
    "ep over cp and tp2": {"ep": "4", "cp": "2", "tp2": "2"},
    "ep x pp": {"ep": "2", "dp_shard": "2", "pp": "2"},
    "ep, ZeRO 1": {"ep": "2", "dp_shard": "4", "zero": "1"},
    "ep, ZeRO 2": {"ep": "2", "dp_shard": "4", "zero": "2"},
    "ep, ZeRO 3": {"ep": "2", "dp_shard": "4", "zero": "3"},
    "ep, ZeRO 0": {"ep": "4", "dp_shard": "4", "zero": "0"},
    "ep, microbatches": {"ep": "2", "microbatch": "1"},
    "ep, ZeRO 3, microbatches, recompute": {
        "ep": "2",
        "dp_shard": "4",
        "zero": "3",
        "microbatch": "1",
        "recompute": "full",
    },
    "ep x tp, recompute compute": {"ep": "2", "tp": "2", "recompute": "compute"},
    "ep x etp": {"ep": "2", "dp_shard": "2", "tp": "2", "etp": "2"},
    "etp 4": {"tp": "4", "etp": "4"},
    "ep x tp, etp 1": {"ep": "2", "dp_shard": "2", "tp": "2", "etp": "1"},
    "shard x etp, ZeRO 3, microbatches, recompute": {
        "ep": "1",
        "dp_shard": "2",
        "tp": "2",
        "etp": "2",
        "zero": "3",
        "microbatch": "1",
        "recompute": "full",
    },
}
"""Of families with experts alone."""
EIGHT: Mapping[str, Mapping[str, str]] = {
    "shard x cp x tp2": {"dp_shard": "2", "cp": "2", "tp2": "2"},
    "pp x cp": {"pp": "2", "cp": "2", "dp_shard": "2"},
    "ring over two levels": {"cp_ring": "4", "cp_outer": "2", "dp_shard": "2", "zero": "3"},
    "rows x heads x shard": {"cp_ring": "2", "cp_head": "2", "dp_shard": "2"},
}
EIGHT_EXPERTS: Mapping[str, Mapping[str, str]] = {
    "shard x cp x tp2, ep 4": {"dp_shard": "2", "cp": "2", "tp2": "2", "ep": "4"},
    "shard x cp x tp2, ep 8": {"dp_shard": "2", "cp": "2", "tp2": "2", "ep": "8"},
    "pp x cp x ep": {"pp": "2", "cp": "2", "dp_shard": "2", "ep": "2"},
}
"""With ``--ranks 8``."""
CLUSTER_8 = """name: 8 processes on one machine
groups:
  - {device: cpu-core, count: 8}
levels:
  - {name: loopback, span: 8, bandwidth: 1 GB/s, latency: 100 us, library: gloo}
"""
WITHOUT = ("vit", "resnet", "convnext", "examples/04_resnet.py", "examples/06_unet.py")
"""They have no dim of tokens."""
SHOULD_BE = ("does not divide the", "a sum over the batch", "would add the experts' bias")
"""Refused as it should be: heads or experts that ranks cannot share evenly, a loss of which
microbatches are no shares, and matrices whose products have a bias behind them."""
SCRIPTS = ("examples/07_train_script.py", "examples/08_train_script_jax.py")
"""They have no model of their own file."""
WITH_EXPERTS = (*EXPERTS, *MORE)


def layouts_of(family: str, ranks: int) -> Mapping[str, Mapping[str, str]]:
    """Those that make sense for a family."""
    usual, routed = (LAYOUTS, EXPERTS_TOO) if ranks == 4 else (EIGHT, EIGHT_EXPERTS)
    return {**usual, **routed} if family in WITH_EXPERTS else usual


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    every = [name for name in (*FAMILIES, *EXAMPLES) if name not in SCRIPTS]
    parser.add_argument("--families", default=",".join(every))
    parser.add_argument("--plans", help="names of layouts, by semicolons")
    parser.add_argument("--ranks", type=int, choices=(4, 8), default=4)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    families = given.families.split(",")
    rows: list[dict[str, Any]] = []
    for family in families:
        layouts = layouts_of(family, given.ranks)
        if given.plans:
            layouts = {n: fix for n, fix in layouts.items() if n in given.plans.split(";")}
        with tempfile.TemporaryDirectory() as scratch:
            cluster = CLUSTER
            if given.ranks == 8:
                cluster = str(Path(scratch) / "cluster.yaml")
                Path(cluster).write_text(CLUSTER_8)
            rows += check(family, Path(scratch), layouts, cluster)
        mine = [row for row in rows if row["family"] == family]
        print(f"{family}: {sum(map(right, mine))} of {len(mine)}", file=sys.stderr, flush=True)
        for row in mine:
            if not right(row):
                print(f"  {row['plan']}: {row['reason']}", file=sys.stderr, flush=True)
    verified = [row for row in rows if "loss" in row]
    worst = max((max(r["loss"], r["gradient"], r["weight"]) for r in verified), default=0.0)
    refused = [r for r in rows if "loss" not in r and r["family"] not in WITHOUT]
    refused = [r for r in refused if not any(text in r["reason"] for text in SHOULD_BE)]
    targets = [
        Target("largest relative error in float64", worst, LIMIT),
        Target("plans that are wrong", sum(not right(row) for row in verified), 0),
        Target("refused, of models with tokens", len(refused), 0),
    ]
    show(rows if given.json else [one_line(f, rows) for f in families], targets, given.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
