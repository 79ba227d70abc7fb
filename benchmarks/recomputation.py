"""What as few blocks that recompute as fit are worth, where memory binds, simulated.

    python -m benchmarks.recomputation [--json]

Llama-3-8B on a node of 8 H100 under pinned degrees, without offload, with less and less memory on
each device: ``one_s`` is the step of the fastest plan whose blocks all do the same (the best of the
policies, each pinned), ``ours_s`` that of the search. Nothing is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.frontends.shared.captured import Captured
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.plan import Plan
from autopar.nouns.recompute import FULL, NONE, POLICIES
from autopar.planner.advice.memories import with_memory
from autopar.planner.planning import plan_captured
from benchmarks import llama3
from benchmarks.figures import Target, show

CLUSTER = "examples/clusters/h100_8.yaml"
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "tp 8": {"tp": "8", "pp": "1"},
    "tp 2 x pp 4": {"tp": "2", "pp": "4", "schedule": "1f1b"},
}
SHARES = (0.05, 0.25, 0.5, 0.75)
"""Of the way from what full recomputation needs to what none does."""


def planned(
    captured: Captured, cluster: Cluster, fix: Mapping[str, str], recompute: str = ""
) -> Plan | None:
    given = {**fix, "offload": "none", **({"recompute": recompute} if recompute else {})}
    try:
        return plan_captured(captured, llama3.llama_8b, cluster, "llama_8b", given).plan
    except UserError:
        return None


def rows_of(name: str, captured: Captured, cluster: Cluster) -> list[dict[str, Any]]:
    fix = {**LAYOUTS[name], "microbatch": "1"}
    roomy = with_memory(cluster, 1 << 40)
    ends = [planned(captured, roomy, fix, recompute) for recompute in (FULL, NONE)]
    low, high = (plan.prediction.memory_bytes.total for plan in ends if plan is not None)
    rows = []
    for share in SHARES:
        limit = round(low + share * (high - low))
        tight = with_memory(cluster, limit)
        alike = [planned(captured, tight, fix, recompute) for recompute in POLICIES]
        one_s = min(plan.prediction.step_time_s for plan in alike if plan is not None)
        ours = planned(captured, tight, fix)
        assert ours is not None
        ours_s = ours.prediction.step_time_s
        rows.append(
            {
                "layout": name,
                "limit_gb": limit / 1e9,
                "one_s": one_s,
                "ours_s": ours_s,
                "ratio": ours_s / one_s,
                "recompute": ours.each("recompute"),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    captured, cluster = capture(llama3.llama_8b), load_cluster(CLUSTER)
    rows = [row for name in LAYOUTS for row in rows_of(name, captured, cluster)]
    worst = max(row["ratio"] for row in rows)
    show(rows, [Target("our step over that of blocks that are alike", worst, 1.0)], given.json)


if __name__ == "__main__":
    main()
