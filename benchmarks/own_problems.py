"""autopar's own sharding problems: how fast they are built and solved, and how well.

    python -m benchmarks.own_problems [--models Llama-3-8B,T5-large] [--meshes 8,32x8]
                                      [--searcher portfolio] [--export DIR] [--json]

Every axis of a mesh is free: it may split any factor of any op (`benchmarks.free_problem`).
Equal layers are treated equally. ``--export`` writes each problem in the contest's JSON, for any
other solver. CPU seconds are of this process and the solver's; costs are seconds of a step, nothing
overlapping. The kernels of the searchers, which are compiled once for a machine, are compiled
before the first row, and what that took is told.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

from autopar.files.cluster_file import cluster_from_text
from autopar.frontends.dispatch import capture
from autopar.frontends.shared.captured import Captured
from autopar.lowering.precision import at_precision
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.nouns.mesh import Mesh
from autopar.pricing.prices import PICOSECONDS
from autopar.searchers import Budget, highs, search
from benchmarks import shapes
from benchmarks.figures import Target, show
from benchmarks.free_problem import FreeProblem, free_problem
from benchmarks.own_models import MODELS

MESHES = ("8", "32x8", "8x4x2", "16x8x4")
SOLVE_LIMIT_S = 5.0
STOP_S = 60.0
"""Wall seconds after which a search is stopped."""


def cluster(devices: int) -> Cluster:
    """Nodes of 8 H100 as in ``examples/clusters/h100_32x8.yaml``, as many as are needed."""
    nodes = devices // 8
    text = f"""
name: {nodes} x 8 H100
groups:
  - {{device: H100, count: {devices}}}
levels:
  - {{name: nvlink, span: 8, bandwidth: 450 GB/s, latency: 2 us, in_network_reduction: true}}
"""
    if nodes > 1:
        text += f"""
  - {{name: infiniband, span: {devices}, bandwidth: 400 Gbit/s, latency: 5 us, ports: 8}}
"""
    return cluster_from_text(text)


def mesh(text: str) -> Mesh:
    """``"8x4x2"`` as the axes a, b and c."""
    sizes = tuple(int(n) for n in text.split("x"))
    return Mesh(tuple("abcdef"[: len(sizes)]), sizes)


def build(captured: Captured, text: str) -> tuple[FreeProblem, float]:
    """The problem of a captured model on a mesh, and the CPU seconds that it took."""
    asked = mesh(text)
    graph = at_precision(captured.graph, "bfloat16")
    started = time.process_time()
    made = free_problem(graph, cluster(asked.device_count), asked, "bfloat16")
    return made, time.process_time() - started


def cpu_s() -> float:
    """CPU seconds so far, the solver's own process included."""
    highs.stop()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def compile_kernels(searcher: str) -> float:
    """CPU seconds of having all kernels ready, on a problem that none of the rows has."""
    started = cpu_s()
    search(shapes.make("wide", size=0.02), searcher, Budget(wall_s=1.0))
    return cpu_s() - started


def row(
    name: str, text: str, captured: Captured, searcher: str, folder: Path | None
) -> dict[str, Any]:
    """One model on one mesh, solved; the claimed cost is that of the plan priced again."""
    made, build_s = build(captured, text)
    problem = made.problem
    if folder is not None:
        from benchmarks.contest_format import dump

        dump(problem, folder / f"{name}_{text}.json")
    started = cpu_s()
    solution = search(problem, searcher, Budget(wall_s=STOP_S))
    solve_s = cpu_s() - started
    again = made.priced_again(solution.choice.tolist())
    if again != solution.cost:
        raise SystemExit(f"{name} on {text}: claimed {solution.cost}, priced again {again}")
    return {
        "model": name,
        "mesh": text,
        "nodes": problem.num_nodes,
        "strategies": len(problem.cost),
        "build_cpu_s": build_s,
        "solve_cpu_s": solve_s,
        "cost_s": solution.cost / PICOSECONDS,
        "bound_s": solution.lower_bound / PICOSECONDS,
        "gap": solution.gap,
        "found_by": solution.found_by,
    }


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    """Every optimum proven, within five CPU seconds of solving."""
    limits = []
    for row in rows:
        name = f"{row['model']} {row['mesh']}"
        limits.append(Target(f"{name}: solve CPU s", row["solve_cpu_s"], SOLVE_LIMIT_S))
        limits.append(Target(f"{name}: gap", row["gap"], 0.0))
    return limits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--meshes", default=",".join(MESHES))
    parser.add_argument("--searcher", default="portfolio")
    parser.add_argument("--export", type=Path, help="a folder for the problems in contest format")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.export is not None:
        options.export.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    print(f"kernels ready after {compile_kernels(options.searcher):.1f} CPU s", file=sys.stderr)
    for name in options.models.split(","):
        print(f"capturing {name}", file=sys.stderr)
        try:
            captured = capture(MODELS[name]())
            for text in options.meshes.split(","):
                print(f"{name} on {text}", file=sys.stderr)
                rows.append(row(name, text, captured, options.searcher, options.export))
        except UserError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    if not rows:
        raise SystemExit("no model could be captured")
    show(rows, targets(rows), options.json)


if __name__ == "__main__":
    main()
