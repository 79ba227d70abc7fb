"""What recomputation laid under exposed traffic could give at most; nothing is run.

    python -m benchmarks.hidden_recomputation [--only "70b on 256"] [--json]

A block that runs again needs nothing of the gradient that is under way, so it could run while
collectives of model axes are waited for in backward (Lynx, Chen et al. 2024; Oases, Li et al.
2023). Llama 3 on H100 with all, half and a quarter of their memory, where fewer bytes ask for more
recomputation: the searched plan, and plans whose blocks all run again, also under the tensor
parallelism of a node, which leaves most bare. ``again_s``: of the step, what runs again;
``inline_s``: collectives of model axes that nothing hides, forward and backward. The oracle hides
the lesser of the two, though a part of them lies in forward, and charges what hidden traffic takes
of compute; ``least`` is it over the searched plan, at most 1 by that much better.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.frontends.dispatch import capture
from autopar.lowering.precision import at_precision
from autopar.nouns.batch import sample_dims
from autopar.nouns.errors import UserError
from autopar.nouns.recompute import KEEP_ALL
from autopar.planner.advice.memories import with_memory
from autopar.planner.planning import PlanResult, plan_captured
from autopar.pricing.units.moves import contention_of
from autopar.report.revisit import revisit
from benchmarks.figures import show
from benchmarks.free_and_pinned import CASES

NAMES = ("8b on 8", "8b on 64", "70b on 256")
SHARES = (1.0, 0.5, 0.25)
"""Of a device's memory."""
FIXES: tuple[Mapping[str, str], ...] = (
    {},
    *({"recompute": policy} for policy in ("selective-op", "compute", "full")),
    *({"recompute": policy, "tp": "8"} for policy in ("compute", "full")),
)


def measured(name: str, share: float) -> Iterator[dict[str, Any]]:
    """A row for each of `FIXES` that can be planned; the first is the searched plan's."""
    case = CASES[name]
    captured, cluster = capture(case.workload), case.cluster()
    memory = min(kind.device.memory_bytes for kind in cluster.kinds)
    cluster = with_memory(cluster, round(share * memory))
    searched_s = 0.0
    for fix in FIXES:
        text = ", ".join(f"{key}={value}" for key, value in fix.items()) or "nothing"
        try:
            result = plan_captured(captured, case.workload, cluster, name, fix)
        except UserError as error:
            print(f"{name}, {share} of the memory, {text}: {error}", file=sys.stderr)
            continue
        row = row_of(result)
        searched_s = searched_s or row["step_s"]
        least = row["oracle_s"] / searched_s
        yield {"pinned": f"{name}, {share:g}: {text}", **row, "least": least}


def row_of(result: PlanResult) -> dict[str, Any]:
    """Of a plan: its step, what of it runs again and what is bare, and the oracle's step."""
    plan = result.plan
    graph = at_precision(result.graph, result.workload.precision)
    batch_dims = sample_dims(result.captured.batch)
    kept = replace(plan, stages=tuple(replace(s, recompute=KEEP_ALL) for s in plan.stages))
    time, whole = (revisit(p, result.cluster, graph, batch_dims).time for p in (plan, kept))
    again_s, inline_s = time.compute_s - whole.compute_s, time.model_communication_s
    hidden_s = (1 - contention_of(result.cluster)) * min(again_s, inline_s)
    split = [f"{axis} {ways}" for axis, ways in plan.degrees.items() if ways > 1]
    return {
        "step_s": time.total_s,
        "again_s": again_s,
        "inline_s": inline_s,
        "oracle_s": time.total_s - hidden_s,
        "plan": f"{' x '.join(split)}, {plan.each('recompute')}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(NAMES), metavar="NAMES")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    names = given.only.split(",")
    show([row for n in names for share in SHARES for row in measured(n, share)], [], given.json)


if __name__ == "__main__":
    main()
