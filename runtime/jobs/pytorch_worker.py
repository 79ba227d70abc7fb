"""What each process of a job started by `autopar.runtime.jobs.pytorch_launch` runs.

    python -m autopar.runtime.jobs.pytorch_worker run|verify '{"json": "options"}' <results>

A process that fails leaves ``error-<rank>.json`` there and stops at once; the launcher tells whose
error came first.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from autopar.files import plan_folder
from autopar.runtime.jobs.failures import report
from autopar.runtime.jobs.library_warnings import once_from_rank_0
from autopar.runtime.jobs.steps import take_steps
from autopar.runtime.jobs.whereabouts import Whereabouts
from autopar.runtime.pytorch.batches import global_batch
from autopar.runtime.pytorch.routed_rows import noting
from autopar.runtime.pytorch.training.load import leave, load, start

MEMORY_IS = {
    "cpu": "resident memory of the fullest process at its peak",
    "cuda": "what PyTorch's allocator held at its peak on the fullest GPU, without CUDA's context",
}

_where = {"step": "before the first step", "action": "", "plan": ""}


def _doing() -> str:
    """``in step 3``, of a pipeline with what it plays."""
    return ", ".join(filter(None, (_where["step"], _where["action"])))


def train(options: dict[str, Any], results: Path) -> None:
    """``steps`` steps of ``plan``; rank 0 prints them and leaves ``result.json``."""
    folder = _where["plan"] = options["plan"]
    start(options["device"], options["timeout_s"])
    trainer = load(folder, options["device"])
    predicted_s = plan_folder.read_plan(folder).prediction.step_time_s
    if options["resume"]:
        trainer.load(options["resume"])
    style = trainer.storage.style
    if options["compile"] is False:
        style = "eager"
        torch.compiler.set_stance("force_eager")
    elif options["compile"] and style == "eager":
        style = "compiled"
        trainer.compile()
    note = Whereabouts(results, trainer.ranks.rank)

    def say(action: str) -> None:
        _where["action"] = action
        note.say(_doing())

    trainer.tell(say)
    first = trainer.ranks.rank == 0
    with noting() as routes:
        taken = take_steps(
            trainer,
            {**options, "quiet": options["quiet"] or not first},
            _where,
            predicted_s,
            global_batch,
            trainer.watch.seconds,
        )
    kind = trainer.ranks.device.type
    result = {
        **taken,
        "style": style,
        "ranks": trainer.ranks.world,
        "peak_memory_bytes": peak_memory_bytes(trainer.ranks.device),
        "memory_is": MEMORY_IS[kind],
        "memory_compares": kind == "cpu",
        "routes": routes.imbalance(trainer.ranks),
        "expert_loads": routes.loads(trainer.ranks),
    }
    if first:
        (results / "result.json").write_text(json.dumps(result))


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


def verify(options: dict[str, Any], results: Path) -> None:
    """Every plan of ``plans``, one after the other; rank 0 leaves ``result.json``."""
    from autopar.runtime.verify.pytorch import verify as verification

    _where["plan"] = options["plans"][0]
    start(options["device"], options["timeout_s"])
    verified = []
    for folder in options["plans"]:
        _where.update(step=f"while verifying {folder}", plan=folder)
        verified.append(verification.verify(folder))
    if not dist.is_initialized() or dist.get_rank() == 0:
        (results / "result.json").write_text(json.dumps(verified))


@record
def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    job, options, results = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    rank = os.environ.get("RANK", "0")
    once_from_rank_0(int(rank))
    try:
        {"run": train, "verify": verify}[job](options, results)
    except Exception as error:  # of any kind: the launcher prints it
        failure = report(error, int(rank), _doing(), _where["plan"])
        written = results / f"{rank}.part"
        written.write_text(json.dumps(failure))
        written.rename(results / f"error-{rank}.json")  # whole, whoever is stopped meanwhile
        # At once, without waiting for threads: the others hang until this process is gone.
        sys.stdout.flush()
        os._exit(1)
    leave()


if __name__ == "__main__":
    main()
