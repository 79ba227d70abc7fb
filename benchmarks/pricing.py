"""What pricing costs: 10,000 layouts of GPT-3 175B on 1024 A100, one after the other.

    python -m benchmarks.pricing [--layouts 10000] [--repeats 3] [--json]

CPU seconds are of this process, without imports. Every layout is priced whole: step time, its
phases, and memory of each pipeline stage. By the formulas of the family all are; from the model's
graph those that it says so far (neither cp, ep nor selective recompute), and the seconds are scaled
to as many.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import islice
from pathlib import Path

from autopar.files.arch_file import load_arch
from autopar.files.cluster_file import load_cluster
from autopar.planner.family.arch_prices import Pricer, unpriced
from autopar.planner.family.estimate import estimate
from autopar.planner.family.layouts import layouts
from benchmarks.figures import Target, show

ARCH = Path("examples/archs/gpt3_175b.yaml")
CLUSTER = Path("examples/clusters/a100_128x8.yaml")
GLOBAL_BATCH = 1536
SWEEP, SWEEP_LIMIT_S, LAYOUT_LIMIT_S = 10_000, 60.0, 0.050


def sweep(count: int) -> list[float]:
    """CPU seconds of each of the first ``count`` layouts."""
    arch, cluster = load_arch(ARCH), load_cluster(CLUSTER)
    spent = []
    for layout in islice(layouts(arch, cluster, GLOBAL_BATCH), count):
        began = time.process_time()
        estimate(arch, cluster, layout)
        spent.append(time.process_time() - began)
    return spent


def from_graph(count: int) -> list[float]:
    """The same from the model's graph, of those that it says."""
    arch, cluster = load_arch(ARCH), load_cluster(CLUSTER)
    pricer, spent = Pricer(cluster, "compiled"), []
    priceable = (x for x in layouts(arch, cluster, GLOBAL_BATCH) if not unpriced(x))
    for layout in islice(priceable, count):
        began = time.process_time()
        pricer(arch, layout)
        spent.append(time.process_time() - began)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=SWEEP)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    runs = [sweep(given.layouts) for _ in range(given.repeats)]
    graphs = [from_graph(given.layouts) for _ in range(given.repeats)]
    rows = [
        {
            "by": by,
            "layouts": len(run),
            "cpu_s": sum(run),
            "median_ms": statistics.median(run) * 1e3,
            "slowest_ms": max(run) * 1e3,
        }
        for by, several in (("formulas", runs), ("graph", graphs))
        for run in several
    ]
    whole = statistics.median(sum(run) for run in runs) * SWEEP / len(runs[0])
    slowest = statistics.median(max(run) for run in runs)
    by_graph = statistics.median(sum(run) for run in graphs) * SWEEP / len(graphs[0])
    targets = [
        Target("CPU seconds of 10,000 layouts", whole, SWEEP_LIMIT_S),
        Target("CPU seconds of 10,000 layouts from the graph", by_graph, SWEEP_LIMIT_S),
        Target("CPU seconds of the slowest layout", slowest, LAYOUT_LIMIT_S),
    ]
    show(rows, targets, given.json)


if __name__ == "__main__":
    main()
