"""What each process of a job started by `autopar.runtime.launch` runs.

    python -m autopar.runtime.worker run|verify '{"json": "options"}' <folder for results>

A process that fails leaves ``error-<rank>.json`` there and stops at once; the launcher tells whose
error came first.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from autopar import plan_folder
from autopar.runtime.batches import Batch
from autopar.runtime.divergence import check_loss
from autopar.runtime.failures import report
from autopar.runtime.library_warnings import once_from_rank_0
from autopar.runtime.loading import load, start
from autopar.runtime.phases import PHASES
from autopar.workload import Workload

MEMORY_IS = {
    "cpu": "resident memory of the fullest process at its peak",
    "cuda": "what PyTorch's allocator held at its peak on the fullest GPU, without CUDA's context",
}

_where = {"step": "before the first step", "plan": ""}


def train(options: dict[str, Any], results: Path) -> None:
    """``steps`` steps of ``plan``; rank 0 prints them and leaves ``result.json``."""
    folder = _where["plan"] = options["plan"]
    start(options["device"], options["timeout_s"])
    trainer = load(folder, options["device"])
    predicted = plan_folder.read_plan(folder).prediction.step_time_s
    if options["resume"]:
        trainer.load(options["resume"])
    if options["compile"]:
        trainer.compile()
    first = not dist.is_initialized() or dist.get_rank() == 0
    losses, times, phases = [], [], []
    for _ in range(options["steps"]):
        step = trainer.step_number
        _where["step"] = f"in step {step}"
        batch = batch_of(trainer.workload, step)
        begin = time.perf_counter()
        loss = float(trainer.step(batch))
        times.append(time.perf_counter() - begin)
        phases.append(trainer.watch.seconds())
        losses.append(loss)
        if first and not options["quiet"]:
            print(
                f"step {step}  loss {loss:.6f}  {times[-1]:.4f} s (predicted {predicted:.4f} s)",
                flush=True,
            )
        check_loss(losses, step, trainer.workload)
        every = options["save_every"]
        if options["save"] and every and trainer.step_number % every == 0:
            trainer.save(options["save"])
    if options["save"]:
        _where["step"] = "while saving"
        trainer.save(options["save"])
    peak = peak_memory_bytes(trainer.ranks.device)
    if first:
        settled = times[1:] or times  # the first step pays for buffers and caches
        result = {
            "losses": losses,
            "step_time_s": median(settled) if settled else 0.0,
            "predicted_step_time_s": predicted,
            "ranks": trainer.ranks.world,
            "step": trainer.step_number,
            "peak_memory_bytes": peak,
            "memory_is": MEMORY_IS[trainer.ranks.device.type],
            "memory_compares": trainer.ranks.device.type == "cpu",
            "phases_s": _medians(phases[1:] or phases),
        }
        (results / "result.json").write_text(json.dumps(result))


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {phase: median(row[phase] for row in rows) for phase in PHASES} if rows else {}


def peak_memory_bytes(device: torch.device) -> int:
    """The largest peak of any process: resident on a CPU, reserved by the allocator on a GPU."""
    if device.type == "cuda":
        own = torch.cuda.max_memory_reserved(device)
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    worst = torch.tensor(own, dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return int(worst)


def batch_of(workload: Workload, step: int) -> Batch:
    """The global batch of a step: ``batch(step)`` where it takes the number, else ``batch()``.

    torch's random numbers in it depend on the step alone, so that every rank makes the same batch.
    """
    taken = inspect.signature(workload.batch).parameters.values()
    numbered = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in taken)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed + step)
        return workload.batch(step) if numbered else workload.batch()


def verify(options: dict[str, Any], results: Path) -> None:
    """Every plan of ``plans``, one after the other; rank 0 leaves ``result.json``."""
    from autopar.runtime.verify import verify_here

    _where["plan"] = options["plans"][0]
    start(options["device"], options["timeout_s"])
    found = []
    for folder in options["plans"]:
        _where.update(step=f"while verifying {folder}", plan=folder)
        found.append(verify_here(folder))
    if not dist.is_initialized() or dist.get_rank() == 0:
        (results / "result.json").write_text(json.dumps(found))


@record
def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    job, options, results = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    rank = os.environ.get("RANK", "0")
    once_from_rank_0(int(rank))
    try:
        {"run": train, "verify": verify}[job](options, results)
    except Exception as error:  # of any kind: the launcher prints it
        found = report(error, int(rank), _where["step"], _where["plan"])
        written = results / f"{rank}.part"
        written.write_text(json.dumps(found))
        written.rename(results / f"error-{rank}.json")  # whole, whoever is stopped meanwhile
        # At once, without waiting for threads: the others hang until this process is gone.
        sys.stdout.flush()
        os._exit(1)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    # Tearing the interpreter down under gloo's threads aborts now and then; the work is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
