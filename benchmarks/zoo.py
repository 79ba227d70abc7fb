"""Every family of the zoo and every example under many plans, verified against one device.

In float64, where rounding hides nothing.

    python -m benchmarks.zoo [--families llama,t5,examples/02_gpt.py] [--keep DIR] [--json]
    python -m benchmarks.zoo --all [--only llama,MaskedLM/bert] [--seed 0] [--sample 40] [--json]

Each model is planned for four processes: pure replication, pure sharding, pure tensor parallelism,
mixed layouts, and the planner's own choice. `autopar verify` runs each plan and the original model
from one seed in float64 and compares loss, all gradients, and all weights after two steps of
clipped AdamW. Families that cannot be captured or planned are rows with the reason.

``--all`` takes the census of transformers instead: all causal types, 41 others
and the entries of `census_tasks`, see `census`.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show
from benchmarks.planned import CLUSTER
from benchmarks.zoo_models import ZOO

EXAMPLES = [
    name
    for name in sorted(map(str, Path("examples").glob("*.py")))
    if "_nnx" not in name or find_spec("flax")
]
LIMIT = 1e-9
CAUSAL_PLANNED, OTHERS_PLANNED = 180, 137
"""Types that were planned once: with ``--all`` none is lost."""
PLANS: Mapping[str, Mapping[str, str]] = {
    "replicate": {"dp_replicate": "4"},
    "shard, ZeRO 3": {"dp_shard": "4", "zero": "3"},
    "tp": {"tp": "4"},
    "replicate x tp": {"dp_replicate": "2", "tp": "2"},
    "shard x tp, ZeRO 2": {"dp_shard": "2", "tp": "2", "zero": "2"},
    "replicate x shard, ZeRO 1": {"dp_replicate": "2", "dp_shard": "2", "zero": "1"},
    "shard x tp, ZeRO 3, microbatches, recompute": {
        "dp_shard": "2",
        "tp": "2",
        "zero": "3",
        "microbatch": "1",
        "recompute": "full",
    },
    "replicate x tp, recompute compute": {
        "dp_replicate": "2",
        "tp": "2",
        "recompute": "compute",
    },
    "the planner's own": {},
}


def check(
    family: str,
    folder: Path,
    plans: Mapping[str, Mapping[str, str]] = PLANS,
    cluster_file: str = CLUSTER,
) -> list[dict[str, Any]]:
    """One row a plan; a plan that cannot be made is a row with the reason."""
    from autopar.runtime.jobs.launch import verify_many
    from benchmarks.planned import planned_in

    made, refused = planned_in(family, folder, plans, cluster_file)
    rows: list[dict[str, Any]] = [
        {"family": family, "plan": name, "reason": reason.splitlines()[0]}
        for name, reason in refused.items()
    ]
    for name, verified in zip(made, verify_many(list(made.values())), strict=True):
        rows.append(
            {
                "family": family,
                "plan": name,
                "loss": verified.exact.loss,
                "gradient": verified.exact.gradient,
                "weight": verified.exact.weight,
                "collectives": bool(verified.collectives_match),
                "own_loss": verified.own.loss,
                "reason": "; ".join(verified.collective_differences),
            }
        )
    return rows


def right(row: Mapping[str, Any]) -> bool:
    """Verified, and moved what was priced."""
    worst = max((row.get(n, float("inf")) for n in ("loss", "gradient", "weight")), default=0)
    return bool(worst <= LIMIT and row.get("collectives"))


def _families(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["family"] for row in rows))


def one_line(family: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One line for a family: its worst errors over all plans; ``--json`` has every plan."""
    mine = [row for row in rows if row["family"] == family]
    verified = [row for row in mine if "loss" in row]

    def worst(name: str) -> str:
        return f"{max(row[name] for row in verified):.1e}" if verified else "-"

    refused = [row["reason"] for row in mine if "loss" not in row]
    return {
        "family": family,
        "plans": len(mine),
        "right": sum(map(right, mine)),
        **{name: worst(name) for name in ("loss", "gradient", "weight")},
        "refused because": re.sub(r" at \S+ \(.*?\)", "", refused[0])[:60] if refused else "",
    }


def _census(given: argparse.Namespace, folder: Path) -> None:
    from benchmarks import census

    start = time.perf_counter()
    rows: list[census.Row] = []
    for row in census.take(census.names(given.only), folder, given.workers, given.seed):
        rows.append(row)
        print(
            f"{row.name}: {row.outcome} {row.cause} ({row.seconds:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
    rows = census.verified(rows, given.sample, given.seed)
    planned = [row for row in rows if row.outcome == "planned"]
    causal = sum(map(census.is_causal, planned))
    worst = max((e for row in planned for e in (row.errors or {}).values()), default=1.0)
    targets = [Target("largest relative error in float64 of the sample", worst, LIMIT)]
    targets.append(
        Target("programs that do not parse", sum(r.outcome == "broken program" for r in rows), 0)
    )
    defects = sum(row.outcome in ("crashed", "defect") for row in rows)
    targets.append(Target("types that crashed or are told a defect of autopar", defects, 0))
    if given.only is None:
        missing, others = CAUSAL_PLANNED - causal, OTHERS_PLANNED - (len(planned) - causal)
        named = f"causal types missing of {CAUSAL_PLANNED} planned"
        targets.append(Target(named, max(0, missing), 0))
        targets.append(Target(f"others missing of {OTHERS_PLANNED} planned", max(0, others), 0))
        targets.append(Target("minutes", (time.perf_counter() - start) / 60, 40.0))
    shown = [census.as_object(row) for row in rows] if given.json else census.by_cause(rows)
    show(shown, targets, given.json)
    total = sum(map(census.is_causal, rows))
    print(
        f"planned: {causal} of {total} causal types, {len(planned) - causal} of "
        f"{len(rows) - total} others; {sum(row.errors is not None for row in rows)} types verified",
        file=sys.stderr,
    )
    sys.exit(0 if all(target.met for target in targets) else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join((*ZOO, *EXAMPLES)))
    parser.add_argument("--plans", default=";".join(PLANS), help="names of plans, by semicolons")
    parser.add_argument("--keep", type=Path, help="where plans and programs stay")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--all", action="store_true", help="the census of transformers")
    parser.add_argument("--only", help="with --all: these types alone")
    parser.add_argument("--seed", type=int, default=0, help="with --all: what it draws by")
    parser.add_argument("--sample", type=int, default=40, help="with --all: types to verify")
    parser.add_argument("--workers", type=int, default=2, help="with --all: processes that plan")
    given = parser.parse_args()
    if given.all:
        with tempfile.TemporaryDirectory() as scratch:
            _census(given, given.keep or Path(scratch))
        return
    plans = {name: PLANS[name] for name in given.plans.split(";")}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for family in given.families.split(","):
            start = time.perf_counter()
            rows += check(family, (given.keep or Path(scratch)) / Path(family).stem, plans)
            mine = [row for row in rows if row["family"] == family]
            print(
                f"{family}: {sum(map(right, mine))} of {len(mine)} plans right, "
                f"{time.perf_counter() - start:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    verified = [row for row in rows if "loss" in row]
    families = {row["family"] for row in verified}
    worst = max((max(r["loss"], r["gradient"], r["weight"]) for r in verified), default=1.0)
    wrong = sum(not right(row) for row in verified)
    targets = [
        Target("largest relative error in float64", worst, LIMIT),
        Target("plans that are wrong or move other bytes than priced", wrong, 0),
        Target("families missing of ten", max(0, min(10, len(_families(rows))) - len(families)), 0),
    ]
    show(rows if given.json else [one_line(f, rows) for f in _families(rows)], targets, given.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
