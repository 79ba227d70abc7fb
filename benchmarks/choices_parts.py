"""Where a step of Llama-3-70B on 256 H100 goes, and what hiding more of its traffic could give.

    python -m benchmarks.choices_parts [--json]

Plans of one stage under a few meshes, all choices free, beside the one with every choice as before
(`benchmarks.choices`), which ``over before`` is over. Seconds of a step: ``compute``, the
collectives of model axes that nothing hides (``inline_s``), of what data axes move (``moved_s``)
the part that nothing hides (``bare_s``) and what the rest takes of the compute that hides it
(``taken_s``). Three oracles, no plan: all that data axes move is hidden (``data hidden``), that of
model axes too (``all hidden``), both taking of compute what hidden traffic takes; and traffic that
takes nothing at all (``compute alone``). Nothing is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from autopar.files.cluster_file import load_cluster
from autopar.frontends.dispatch import capture
from autopar.lowering.precision import at_precision
from autopar.planner.planning import plan_captured
from autopar.pricing.units.moves import contention_of
from autopar.report.revisit import revisit
from benchmarks.choices import BEFORE, CASES, GAIN
from benchmarks.figures import Target, show

CASE = "70B on 256"
FIXES: Mapping[str, Mapping[str, str]] = {
    "as before": BEFORE,
    "nothing": {},
    "cp=8": {"cp": "8", "pp": "1"},
    "tp=2,cp=2": {"tp": "2", "cp": "2"},
    "tp=4": {"tp": "4"},
    "tp=4,tp_pieces=1": {"tp": "4", "tp_pieces": "1"},
    "tp=8": {"tp": "8", "pp": "1"},
}


def rows() -> list[dict[str, Any]]:
    workload, file = CASES[CASE]
    captured, cluster = capture(workload), load_cluster(file)
    batch_dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    contention, before_s = contention_of(cluster), 0.0
    made: list[dict[str, Any]] = []
    for name, fix in FIXES.items():
        result = plan_captured(captured, workload, cluster, CASE, fix)
        graph = at_precision(result.graph, workload.precision)
        time = revisit(result.plan, result.cluster, graph, batch_dims).time
        # What is hidden takes its share of compute: exposed = bare + contention (moved - bare).
        moved_s, inline_s = time.data_communication_s, time.model_communication_s
        bare_s = (time.exposed_s - contention * moved_s) / (1 - contention)
        before_s = before_s or time.total_s
        hidden_s = time.total_s - (1 - contention) * bare_s
        split = [f"{axis} {ways}" for axis, ways in result.plan.degrees.items() if ways > 1]
        made.append(
            {
                "pinned": name,
                "step_s": time.total_s,
                "over before": time.total_s / before_s,
                "compute_s": time.compute_s,
                "inline_s": inline_s,
                "moved_s": moved_s,
                "bare_s": bare_s,
                "taken_s": time.exposed_s - bare_s,
                "data hidden": hidden_s / before_s,
                "all hidden": (hidden_s - (1 - contention) * inline_s) / before_s,
                "compute alone": (time.compute_s + time.optimizer_s) / before_s,
                "layout": " x ".join(split),
            }
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    made = rows()
    best = min(row["over before"] for row in made)
    show(made, [Target(f"{CASE}: step over before", best, GAIN)], given.json)


if __name__ == "__main__":
    main()
