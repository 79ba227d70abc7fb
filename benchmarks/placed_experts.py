"""Example 10 with experts in order, and placed by the rows of the steps before.

    python -m benchmarks.placed_experts [--steps 20] [--layouts "ep=4;ep=2,tp=2"] [--json]

Under each layout so many steps run with experts in order; what they send each expert is what the
plan is made with that places them. The same steps run with that, and both go on from one
checkpoint for as many other steps, whose routes nobody knew. A row has what the busiest rank had
over the mean, call by call, and what plans are priced with. Losses are the same but for rounding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.cli.commands import plan_files, search
from autopar.files import plan_folder
from autopar.nouns.grammar import pairs_of
from autopar.nouns.imbalance import Imbalance
from autopar.nouns.plan import Plan
from autopar.report.routes import placement_object
from autopar.runtime.jobs import launch
from benchmarks.figures import Target, show

MODEL, CLUSTER = "examples/10_experts.py", "examples/clusters/cpu_4.yaml"
LAYOUTS = "ep=4,dp_shard=4;ep=2,tp=2,dp_shard=2"
LIKE = 1e-3
"""Of a loss, by which two orders of the same sums may be apart after some steps."""


def planned(folder: Path, fix: Mapping[str, str], routes: Imbalance | None, order: str) -> Plan:
    made = search(MODEL, CLUSTER, {**fix, "expert_placement": order}, None, (), imbalance=routes)
    plan_folder.write(folder, plan_files(made, folder)[0])
    return made.plan


def measured(layout: str, steps: int, scratch: Path) -> dict[str, Any]:
    fix = pairs_of([layout])
    folders = {order: scratch / f"{layout} {order}" for order in ("order", "load")}
    saved = scratch / f"{layout} saved"
    planned(folders["order"], fix, None, "order")
    first = launch.run(folders["order"], steps, save=saved, quiet=True)
    loads = {name: tuple(map(float, rows)) for name, rows in first.expert_loads.items()}
    routes = Imbalance(first.routes["mean"], first.routes["worst"], "the steps before", loads)
    plan = planned(folders["load"], fix, routes, "load")
    placing = placement_object(plan)
    assert placing is not None, f"{layout}: nothing is placed"
    again = launch.run(folders["load"], steps, quiet=True)
    later = {o: launch.run(f, steps, resume=saved, quiet=True) for o, f in folders.items()}
    return {
        "layout": layout,
        "in_order": first.routes["rank_mean"],
        "placed": again.routes["rank_mean"],
        "priced_in_order": placing["in_order"],
        "priced_placed": placing["placed"],
        "later_in_order": later["order"].routes["rank_mean"],
        "later_placed": later["load"].routes["rank_mean"],
        "losses_apart": abs(again.losses[-1] / first.losses[-1] - 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layouts", default=LAYOUTS, help="by semicolons")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="autopar-") as scratch:
        rows = [measured(each, given.steps, Path(scratch)) for each in given.layouts.split(";")]
    targets = [
        target
        for row in rows
        for target in (
            Target(f"{row['layout']}: placed over in order", row["placed"] / row["in_order"], 1.0),
            Target(f"{row['layout']}: losses apart", row["losses_apart"], LIKE),
        )
    ]
    show(rows, targets, given.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
