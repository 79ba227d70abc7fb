"""Pipelines verified against one device: every schedule, alone and with tensor or data parallelism.

In float64, with the messages and collectives of every rank compared with what was priced.

    python -m benchmarks.pipelines [--models examples/02_gpt.py,examples/06_unet.py]
                                   [--framework jax] [--ranks 4] [--only "x tp"] [--keep DIR]
                                   [--json]

With ``--ranks 8`` every schedule runs over four pipeline ranks times two of tensor or data
parallelism. Each model is deep enough for each; one that cannot be is a row with the reason.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Container, Mapping
from pathlib import Path

from autopar.nouns.recompute import policies
from autopar.pipeline.schedules.table import SCHEDULES
from benchmarks.figures import Target, show
from benchmarks.zoo import LIMIT, check, right

DEEP = "benchmarks/pipelined_models.py"
MODELS = ("examples/02_gpt.py", f"{DEEP}:llama", f"{DEEP}:t5", "examples/06_unet.py")
JAX = "benchmarks/jax_pipelined_models.py"
JAX_MODELS = (f"{JAX}:gpt", f"{JAX}:llama", f"{JAX}:t5", f"{JAX}:unet")
CLUSTER = Path("examples/clusters/cpu_4.yaml")
STATE: Mapping[str, Mapping[str, str]] = {
    "1f1b x shard, ZeRO 1": {"schedule": "1f1b", "dp_shard": "2", "zero": "1"},
    "1f1b x shard, ZeRO 2": {"schedule": "1f1b", "dp_shard": "2", "zero": "2"},
    "1f1b x shard, ZeRO 3": {"schedule": "1f1b", "dp_shard": "2", "zero": "3"},
    "zb-h1 x shard, ZeRO 3": {"schedule": "zb-h1", "dp_shard": "2", "zero": "3"},
    "1f1b x tp, recompute full": {"schedule": "1f1b", "tp": "2", "recompute": "full"},
    "zb-v x tp, recompute compute": {"schedule": "zb-v", "tp": "2", "recompute": "compute"},
    "zb-h1 x tp, recompute selective-op": {
        "schedule": "zb-h1",
        "tp": "2",
        "recompute": "selective-op",
    },
}


def plans(ranks: int, known: Container[str]) -> dict[str, dict[str, str]]:
    """Layouts by name, with recomputation that is ``known``."""
    pp = 4
    small = {"pp": str(ranks // 2)}
    if ranks == 4:
        fixes = {name: {"pp": "4", "schedule": name} for name in SCHEDULES}
    else:
        fixes = {
            f"{name} x {axis}": {"pp": str(pp), "schedule": name, axis: "2"}
            for name in SCHEDULES
            for axis in ("tp", "dp_replicate")
        }
    may = {n: fix for n, fix in STATE.items() if fix.get("recompute", "none") in known}
    return fixes | {name: {**small, **fix} for name, fix in may.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--framework", default="torch", choices=("torch", "jax"))
    parser.add_argument("--models", help="in place of those of the framework")
    parser.add_argument("--ranks", type=int, default=4, choices=(4, 8))
    parser.add_argument("--only", default="", help="layouts whose name has this text")
    parser.add_argument("--keep", type=Path, help="where plans and programs stay")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        home = given.keep or Path(scratch)
        home.mkdir(parents=True, exist_ok=True)
        cluster = home / "cluster.yaml"
        text = CLUSTER.read_text()
        for word in ("{} processes", "count: {}", "span: {}"):
            text = text.replace(word.format(4), word.format(given.ranks))
        cluster.write_text(text)
        models = JAX_MODELS if given.framework == "jax" else MODELS
        every = plans(given.ranks, policies(given.framework))
        layouts = {name: fix for name, fix in every.items() if given.only in name}
        if not layouts:
            parser.error(f"no layout has {given.only!r}: {', '.join(every)}")
        for model in given.models.split(",") if given.models else models:
            for row in check(model, home / Path(model).name, layouts, str(cluster)):
                rows.append(row)
                outcome = "right" if right(row) else row["reason"] or "WRONG"
                print(f"{row['family']}: {row['plan']}: {outcome}", flush=True)
    made = [row for row in rows if "loss" in row]
    wrong = [row for row in made if not right(row)]
    worst = max((max(r["loss"], r["gradient"], r["weight"]) for r in made), default=0.0)
    targets = [
        Target("plans that cannot be", len(rows) - len(made), 0),
        Target("plans that are not right", len(wrong), 0),
        Target("largest relative error in float64", worst, LIMIT),
    ]
    show(rows, targets, given.json)


if __name__ == "__main__":
    main()
