"""Clusters of two kinds of devices: plans that know it beside those that do not, simulated.

    python -m benchmarks.unequal [--rows "8 + 8,32 + 32"] [--json]

Of each cluster three plans of one model, and the seconds of a step: the best that takes all devices
as the slower kind (``slower_s``, its own prediction, and ``played_s``, that plan on the devices as
they are, the faster kind first or last, whichever is better); the best of the faster group alone
(``alone_s``); ours. ``gain`` is ``played_s`` over ours, ``idle`` the devices that ours leaves out,
``cpu_s`` what its planning took. Nothing is run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.files.cluster_file import cluster_from_text
from autopar.frontends.dispatch import capture
from autopar.frontends.shared.captured import Captured
from autopar.lowering.precision import at_precision
from autopar.nouns.cluster import Cluster, DeviceGroup
from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload
from autopar.planner.ask.selections import part_of
from autopar.planner.planning import PlanResult, plan_captured
from autopar.report.revisit import revisit
from benchmarks import llama3
from benchmarks.figures import Target, show

GAIN = 1.15
"""What half A100, half H100 must gain over the best plan that takes all as A100."""


@dataclass(frozen=True, slots=True)
class Row:
    """``slow`` and ``fast``: device, count, devices of a node, GB/s of NVLink (one direction, from
    the datasheets); ``between``: of the link that joins nodes, and of one that joins the groups."""

    model: str
    slow: tuple[str, int, int, int]
    fast: tuple[str, int, int, int]
    between: tuple[str, str]

    @property
    def cluster(self) -> Cluster:
        nodes, sites = self.between
        groups = []
        for device, count, node, speed in (self.slow, self.fast):
            inside = f"{{name: nvlink, span: {node}, bandwidth: {speed} GB/s, latency: 2 us}}"
            wide = f", {{name: infiniband, span: {count}, {nodes}, ports: {node}}}"
            levels = inside + (wide if count > node else "")
            groups.append(f"  - {{device: {device}, count: {count}, levels: [{levels}]}}")
        total = self.slow[1] + self.fast[1]
        outer = f"levels: [{{name: between, span: {total}, {sites}}}]"
        return cluster_from_text("\n".join(["groups:", *groups, outer]), self.name)

    @property
    def name(self) -> str:
        return f"{self.slow[1]} {self.slow[0]} + {self.fast[1]} {self.fast[0]}, {self.model}"


NODES = "bandwidth: 200 Gbit/s, latency: 5 us"
A100, H100, V100 = ("A100-80GB", 300), ("H100", 450), ("V100-32GB", 150)


def _row(
    model: str,
    slow: tuple[str, int],
    counts: tuple[int, int],
    fast: tuple[str, int] = H100,
    between: str = NODES,
    node: int = 8,
) -> Row:
    one = slow[0], counts[0], node, slow[1]
    return Row(model, one, (fast[0], counts[1], node, fast[1]), (NODES, between))


WAN = "bandwidth: 100 Gbit/s, latency: 1 ms, ports: 1"
ROWS: Mapping[str, Row] = {
    "8 + 8": _row("llama_8b", A100, (8, 8)),
    "32 + 32": _row("llama_70b", A100, (32, 32)),
    "two sites": _row("llama_8b", A100, (16, 16), between=WAN),
    "16 + 8": _row("llama_8b", A100, (16, 8)),
    "8 + 8 V100": _row("llama_8b", V100, (8, 8), A100),
}
JUDGED = ("8 + 8", "32 + 32")


def as_slower(cluster: Cluster) -> Cluster:
    """All devices as the slowest, joined as the slowest are."""
    return replace(cluster, groups=(DeviceGroup(cluster.device, cluster.device_count),))


def played_s(planned: PlanResult, cluster: Cluster, captured: Captured, precision: str) -> float:
    """Seconds of a step of the plan on the devices of ``cluster``, in the better of two orders."""
    batch_dims = {e.name: e.batch_dim for e in captured.batch if e.batch_dim is not None}
    graph = at_precision(planned.graph, precision)
    orders = (cluster, replace(cluster, groups=cluster.groups[::-1]))
    return min(revisit(planned.plan, on, graph, batch_dims).time.total_s for on in orders)


def layout(planned: PlanResult | None) -> str:
    if planned is None:
        return "fits nowhere"
    plan = planned.plan
    split = [f"{name} {ways}" for name, ways in plan.degrees.items() if ways > 1]
    return f"{' x '.join(split)}, {plan.schedule}, {plan.microbatches} microbatches"


def measured(row: Row, captured: Captured, model: Workload) -> dict[str, Any]:
    def planned(cluster: Cluster) -> PlanResult | None:
        try:
            return plan_captured(captured, model, cluster, row.model)
        except UserError:
            return None

    def seconds(made: PlanResult | None) -> float | None:
        return None if made is None else made.plan.prediction.step_time_s

    cluster = row.cluster
    start = time.process_time()
    ours = planned(cluster)
    cpu_s = time.process_time() - start
    assert ours is not None
    slower, alone = planned(as_slower(cluster)), planned(part_of(cluster, (0, row.fast[1])))
    played = None if slower is None else played_s(slower, cluster, captured, model.precision)
    step_s = ours.plan.prediction.step_time_s
    print(f"{row.name}: as slower {layout(slower)}; alone {layout(alone)}; ours {layout(ours)}")
    return {
        "cluster": row.name,
        "slower_s": seconds(slower),
        "played_s": played,
        "alone_s": seconds(alone),
        "ours_s": step_s,
        "gain": None if played is None else played / step_s,
        "idle": sum(group.count for group in ours.cluster.idle),
        "cpu_s": cpu_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    chosen = given.rows.split(",")
    models = {ROWS[name].model: getattr(llama3, ROWS[name].model) for name in chosen}
    captured = {name: capture(model) for name, model in models.items()}
    rows, targets = [], []
    for name in chosen:
        row = ROWS[name]
        made = measured(row, captured[row.model], models[row.model])
        rows.append(made)
        if name in JUDGED and made["gain"]:
            what = f"{row.name}: our step over that of a plan for the slower kind"
            targets.append(Target(what, 1 / made["gain"], 1 / GAIN))
    show(rows, targets, given.json)


if __name__ == "__main__":
    main()
