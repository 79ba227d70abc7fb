"""Dispatched experts against transformers' `AllToAllEP`, forward and backward, on 4 processes.

    python -m benchmarks.expert_dispatch [--rounds 24] [--tokens 512] [--dtype float32] [--json]

Mixtral's experts, each process with its own tokens and its piece of the experts. Sides take turns
in every round, in an order that rotates: ours twice, as two sides, whose ratio is the noise of the
machine; transformers' with its loop over experts and with its grouped product. Before that all must
agree with ours in float64, result and gradients. A ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import Target, show

PROCESSES, EXPERTS, EACH, HIDDEN, INNER = 4, 16, 2, 256, 512
THEIRS = {"transformers, loop": "eager", "transformers, grouped": "grouped_mm"}
AGREE, LIMIT = 1e-9, 1.0
Run = Callable[..., Any]


def ours(up: Any, down: Any) -> Run:
    import torch.nn.functional as F

    from autopar.runtime.pytorch.experts import experts

    def run(x: Any, index: Any, weights: Any) -> Any:
        return experts(x, index, weights, up, down, gate=lambda g, h: F.silu(g) * h, dispatch="ep")

    return run


def theirs(up: Any, down: Any, implementation: str) -> Run:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import MixtralConfig
    from transformers.distributed.expert_parallel import AllToAllEP
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_local_experts=EXPERTS // PROCESSES,
        experts_implementation=implementation,
    )
    module: Any = MixtralExperts(config)
    module.gate_up_proj, module.down_proj = up, down
    mesh = init_device_mesh("cpu", (PROCESSES, 1), mesh_dim_names=("ep", "tp"))
    run: Run = AllToAllEP(module, mesh["ep"], mesh["tp"])
    return run


def tensors(tokens: int, dtype: Any) -> tuple[list[Any], Any]:
    """x, weights and matrices of this rank as leaves, and its routes."""
    import torch
    import torch.distributed as dist

    draw = torch.Generator().manual_seed(dist.get_rank())
    own = EXPERTS // PROCESSES
    shapes = ((tokens, HIDDEN), (tokens, EACH), (own, 2 * INNER, HIDDEN), (own, HIDDEN, INNER))
    made = [torch.randn(s, generator=draw, dtype=dtype) * 0.1 for s in shapes]
    scores = torch.rand(tokens, EXPERTS, generator=draw)
    return [torch.nn.Parameter(t) for t in made], scores.topk(EACH).indices


def sides(leaves: list[Any], also: Mapping[str, str]) -> dict[str, Run]:
    _, _, up, down = leaves
    made = {"ours": ours(up, down), "ours again": ours(up, down)}
    return made | {name: theirs(up, down, how) for name, how in also.items()}


def step(run: Run, leaves: list[Any], index: Any) -> list[Any]:
    """The result and all gradients."""
    import torch

    x, weights, *_ = leaves
    for leaf in leaves:
        leaf.grad = None
    made = run(x, index, weights)
    torch.autograd.backward(made, made.detach())
    return [made.detach(), *(leaf.grad for leaf in leaves)]


def furthest(tokens: int) -> float:
    """The largest relative difference from ours, in float64, which the grouped product lacks."""
    import torch

    leaves, index = tensors(tokens, torch.float64)
    runs = sides(leaves, {"loop": "eager"})
    one, *_, other = [step(run, leaves, index) for run in runs.values()]
    return max(float((a - b).norm() / a.norm()) for a, b in zip(one, other, strict=True))


def measure(folder: Path, rounds: int, tokens: int, dtype: str) -> None:
    """The worker; rank 0 leaves ``times.json``."""
    import torch
    import torch.distributed as dist

    from autopar.runtime.pytorch.ranks import Ranks, using

    dist.init_process_group("gloo")
    with using(Ranks({"ep": PROCESSES})):
        apart = furthest(tokens)
        leaves, index = tensors(tokens, getattr(torch, dtype))
        known = sides(leaves, THEIRS)
        times: dict[str, list[float]] = {name: [] for name in known}
        names = list(known)
        for turn in range(2 + rounds):  # the first two are not counted
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                start = time.perf_counter()
                step(known[name], leaves, index)
                dist.barrier()
                times[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        counted = {name: seconds[2:] for name, seconds in times.items()}
        (folder / "times.json").write_text(json.dumps({"apart": apart, "times": counted}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512, help="of each process")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(Path(options.worker), options.rounds, options.tokens, options.dtype)
        return
    with tempfile.TemporaryDirectory() as scratch:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        run += [f"--nproc-per-node={PROCESSES}", "-m", "benchmarks.expert_dispatch"]
        run += [f"--rounds={options.rounds}", f"--tokens={options.tokens}"]
        run += [f"--dtype={options.dtype}", "--worker", scratch]
        subprocess.run(run, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        made = json.loads((Path(scratch) / "times.json").read_text())
    rows = []
    for name, seconds in made["times"].items():
        ratios = [a / b for a, b in zip(made["times"]["ours"], seconds, strict=True)]
        rows.append(
            {
                "side": name,
                "median_s": statistics.median(seconds),
                "ours / this": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    best = max(row["ours / this"] for row in rows if row["side"] in THEIRS)
    targets = [
        Target("largest relative difference in float64", made["apart"], AGREE),
        Target("ours / the faster of transformers'", best, LIMIT),
    ]
    show(rows, targets, options.json)


if __name__ == "__main__":
    main()
