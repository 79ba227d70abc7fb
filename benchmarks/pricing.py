"""What pricing costs: 10,000 layouts of GPT-3 175B on 1024 A100, one after the other.

    python -m benchmarks.pricing [--layouts 10000] [--repeats 3] [--json]

CPU seconds are of this process, without imports. Every layout is priced whole: step time, its
phases, and memory of each pipeline stage; then layouts of DeepSeek-V3 on 2,048 H800.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

from autopar.cost_models.catalogue import find_device
from autopar.files.cluster_file import load_cluster
from autopar.frontends.family.arch import Arch
from autopar.frontends.family.arch_file import load_arch
from autopar.nouns.cluster import Cluster, DeviceGroup
from autopar.planner.family.runs import price, run_on
from autopar.planner.family.sweep import layouts
from benchmarks.figures import Target, show

GLOBAL_BATCH = 1536
SWEEP, SWEEP_LIMIT_S = 10_000, 60.0


def gpt3() -> tuple[Arch, Cluster]:
    cluster = load_cluster(Path("examples/clusters/a100_128x8.yaml"))
    return load_arch(Path("examples/archs/gpt3_175b.yaml")), cluster


def deepseek_v3() -> tuple[Arch, Cluster]:
    nodes = load_cluster(Path("examples/clusters/h100_32x8.yaml"))
    node, fabric = nodes.levels
    many = replace(nodes, groups=(DeviceGroup(find_device("H800"), 2048),))
    many = replace(many, levels=(node, replace(fabric, span=2048)))
    return load_arch(Path("examples/archs/deepseek_v3.yaml")), many


MODELS = {"GPT-3 175B on 1,024 A100": gpt3, "DeepSeek-V3 on 2,048 H800": deepseek_v3}


def sweep(arch: Arch, cluster: Cluster, count: int) -> list[float]:
    """CPU seconds of each of ``count`` layouts, drawn from all."""
    spent = []
    every = [*layouts(arch, cluster, GLOBAL_BATCH)]
    for layout in random.Random(0).sample(every, min(count, len(every))):
        began = time.process_time()
        price(run_on(arch, cluster, layout))
        spent.append(time.process_time() - began)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=SWEEP)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    runs = {
        name: [sweep(*read(), given.layouts) for _ in range(given.repeats)]
        for name, read in MODELS.items()
    }
    rows = [
        {
            "model": name,
            "layouts": len(run),
            "cpu_s": sum(run),
            "median_ms": statistics.median(run) * 1e3,
            "slowest_ms": max(run) * 1e3,
        }
        for name, several in runs.items()
        for run in several
    ]
    whole = {
        name: statistics.median(sum(run) for run in several) * SWEEP / len(several[0])
        for name, several in runs.items()
    }
    targets = [
        Target(f"CPU seconds of 10,000 layouts of {name}", seconds, SWEEP_LIMIT_S)
        for name, seconds in whole.items()
    ]
    show(rows, targets, given.json)


if __name__ == "__main__":
    main()
