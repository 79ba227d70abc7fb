"""Predicted memory of JAX programs against XLA's own account of them.

    python -m benchmarks.jax_memory [--json] [--only TEXT]

A model is planned with its layout pinned, the program emitted, and the training step compiled for
eight virtual CPU devices, from shapes alone. XLA's account is that of one device: arguments and
temporary arrays, and of the results what takes no argument's place. The prediction is the plan's,
without what is no array of the program: the allocator's share and the process. Plans compute in
float32, since XLA widens bfloat16 on CPUs, which other devices do not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show

DEVICES = 8
FLAGS = (
    f"--xla_force_host_platform_device_count={DEVICES}",
    # how machine code is made of what has its memory by then
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
CHILD = "AUTOPAR_JAX_MEMORY"
MEDIAN, MOST = 0.05, 0.15
CLUSTER = Path(__file__).parents[1] / "examples" / "clusters" / "h100_8.yaml"


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its pinned layout. ``held_out``: nothing was changed after looking at it."""

    model: str
    fix: str
    held_out: bool = False


CASES = (
    Case("gpt", "dp_replicate=8,recompute=none"),
    Case("gpt", "dp_shard=8,zero=3,recompute=none,microbatch=2"),
    Case("gpt", "dp_replicate=4,tp=2,recompute=full"),
    Case("llama", "dp_shard=8,zero=1,recompute=none"),
    Case("llama", "dp_shard=8,zero=2,recompute=none,microbatch=1"),
    Case("llama", "dp_shard=4,zero=3,tp=2,recompute=none"),
    Case("llama", "dp_shard=4,zero=3,tp=2,recompute=compute"),
    Case("vit", "dp_shard=8,zero=3,recompute=none"),
    Case("vit", "dp_replicate=2,tp=4,recompute=full"),
    Case("vit", "dp_replicate=2,dp_shard=4,zero=2,recompute=none"),
    Case("llama3 8b", "dp_shard=8,zero=3,recompute=none"),
    Case("llama3 8b", "dp_shard=8,zero=3,recompute=full"),
    Case("llama3 8b", "dp_shard=2,tp=4,zero=1,recompute=none"),
    Case("llama3 8b", "tp=8,recompute=full,microbatch=4"),
    Case("llama3 8b", "dp_shard=4,zero=2,tp=2,recompute=full,microbatch=1"),
    Case("mlp", "dp_replicate=2,tp=4,recompute=none", held_out=True),
    Case("mlp", "dp_shard=8,zero=2,recompute=full", held_out=True),
    Case("gpt in a loop", "dp_replicate=2,dp_shard=2,tp=2,zero=3,recompute=none", held_out=True),
    Case("llama", "dp_replicate=8,recompute=full,microbatch=1", held_out=True),
    Case("llama3 8b", "dp_replicate=2,dp_shard=4,zero=3,recompute=none", held_out=True),
    Case("gpt", "pp=4,tp=2,schedule=1f1b,recompute=none,microbatch=4"),
    Case("gpt", "pp=2,dp_shard=4,zero=1,schedule=gpipe,recompute=full,microbatch=2"),
    Case("llama", "pp=4,dp_shard=2,zero=3,schedule=1f1b,recompute=none,microbatch=1"),
    Case("llama", "pp=2,tp=4,schedule=zb-h1,recompute=none,microbatch=2"),
    Case("llama3 8b", "pp=4,tp=2,schedule=1f1b,recompute=full,microbatch=1"),
    Case("llama3 8b", "pp=8,schedule=1f1b,recompute=none,microbatch=1"),
    Case("vit", "pp=4,dp_replicate=2,schedule=interleaved-1f1b,recompute=none,microbatch=16"),
    Case("mlp", "pp=8,schedule=zb-v,recompute=none,microbatch=2048"),
    Case("gpt", "pp=2,dp_shard=2,tp=2,zero=2,schedule=zb-h1,recompute=none,microbatch=4", True),
    Case("llama", "pp=4,tp=2,schedule=chimera,recompute=none,microbatch=2", held_out=True),
    Case("gpt", "dp_replicate=8,recompute=none,loss_chunks=4", held_out=True),
    Case("llama", "dp_shard=4,zero=3,tp=2,recompute=none,loss_chunks=8", held_out=True),
    Case("llama3 8b", "dp_shard=8,zero=3,recompute=full,loss_chunks=4", held_out=True),
    Case("llama", "pp=4,tp=2,schedule=1f1b,recompute=none,microbatch=2,loss_chunks=4", True),
)


def models() -> dict[str, Callable[[], Any]]:
    """The workloads by name."""
    from benchmarks import jax_models as m

    return {
        "gpt": lambda: m.gpt(12, 768, 12, 32000, samples=32, length=1024),
        "gpt in a loop": lambda: m.gpt(6, 512, 8, 8000, samples=64, length=512, scan=False),
        "llama": lambda: m.llama(16, 1024, 16, 4, 2816, 32000, samples=16, length=2048),
        "vit": lambda: m.vit(12, 768, 12, samples=256),
        "mlp": lambda: m.mlp(24, 2048, samples=32768),
        "llama3 8b": lambda: m.llama3_8b(samples=8, length=4096),
    }


@dataclass(frozen=True, slots=True)
class Compared:
    """Bytes on one device: predicted, and by XLA's account, of which ``arguments``."""

    predicted: int
    xla: int
    arguments: int

    @property
    def error(self) -> float:
        return self.predicted / self.xla - 1


def compared(case: Case) -> Compared:
    """Plans, emits and compiles, in a process that has the virtual devices."""
    from autopar.emit.jax import emit
    from autopar.frontends.jax.capture import capture_workload
    from autopar.planner.planning import plan_captured
    from autopar.runtime.jax.programs import pipeline_alone, run_program, step_alone
    from autopar.runtime.jax.staged_memory import peak_bytes

    given = models()[case.model]()
    captured = capture_workload(given)
    fix = dict(part.split("=") for part in case.fix.split(","))
    planned = plan_captured(captured, given, roomy(), "benchmarks/jax_models.py:model", fix)
    files = emit(planned.lowered, planned.plan, captured)
    predicted = planned.plan.prediction.memory_bytes
    arrays = predicted.allocated - predicted.buffers
    if len(planned.plan.stages) > 1:
        pipeline = pipeline_alone(files, given)
        return Compared(arrays, peak_bytes(pipeline, *pipeline.shapes(given.batch())), 0)
    step = step_alone(run_program(files["model.py"]), given)
    memory = step.step.lower(*step.shapes(given.batch())).compile().memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    xla = memory.argument_size_in_bytes + memory.temp_size_in_bytes + made
    return Compared(arrays, xla, memory.argument_size_in_bytes)


def row(case: Case) -> dict[str, Any]:
    """One row of the table."""
    figures = compared(case)
    return {
        "model": case.model + (" *" if case.held_out else ""),
        "layout": case.fix,
        "predicted GB": round(figures.predicted / 1e9, 2),
        "XLA GB": round(figures.xla / 1e9, 2),
        "error": round(figures.error, 3),
        "arguments GB": round(figures.arguments / 1e9, 2),
    }


def roomy() -> Any:
    """One node of eight devices on which anything fits."""
    from autopar.files.cluster_file import load_cluster

    cluster = load_cluster(str(CLUSTER))
    (group,) = cluster.groups
    device = replace(group.device, memory_bytes=1 << 43)
    return replace(cluster, groups=(replace(group, device=device),))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="rows whose model and layout have this text")
    arguments = parser.parse_args()
    if CHILD not in os.environ:  # the devices must be there before jax is
        flags = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", CHILD: "1"}
        command = [sys.executable, "-m", "benchmarks.jax_memory", *sys.argv[1:]]
        return subprocess.run(command, env=environment).returncode
    rows = []
    for case in CASES:
        if arguments.only in f"{case.model} {case.fix}":
            rows.append(row(case))
            print(rows[-1], file=sys.stderr, flush=True)
    if not rows:
        parser.error(f"no row has {arguments.only!r}")
    off = [abs(measured["error"]) for measured in rows]
    targets = (
        Target("error at the median", statistics.median(off), MEDIAN),
        Target("largest error", max(off), MOST),
    )
    show(rows, targets, arguments.json)
    return 0 if all(target.met for target in targets) else 1


if __name__ == "__main__":
    raise SystemExit(main())
