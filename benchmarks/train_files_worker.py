"""What each rank of `benchmarks.train_files` runs: `main` of ``train.py`` beside the trainer.

    python -m benchmarks.train_files_worker <folder with folders.json>

``folders.json`` lists plan folders; rank 0 leaves ``results.json``: for each what differs, "" where
losses, weights and buffers of both are the same bit for bit on every rank.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.files import plan_folder
from autopar.runtime.pytorch.batches import global_batch
from autopar.runtime.pytorch.training.load import leave, load, start
from autopar.runtime.shared.program_module import read_train

STEPS = 3


def compared(folder: str) -> str:
    """What differs between `STEPS` steps of ``train.py`` and of the trainer; all ranks call it."""
    trainer: Any = load(folder, "cpu", check_model=False)
    stands = [trainer.step(global_batch(trainer.workload, step)) for step in range(STEPS)]
    wanted = _held(trainer.storage)
    module: Any = read_train(folder)
    states: list[Any] = []
    losses: list[torch.Tensor] = []
    hold, backward = module.hold, module.backward

    def held(*given: Any) -> Any:
        states.append(hold(*given))
        return states[-1]

    def with_loss(*given: Any) -> Any:
        losses.append(backward(*given))
        return losses[-1]

    module.hold, module.backward = held, with_loss
    with redirect_stdout(StringIO()):
        module.main(torch.device("cpu"), STEPS)
    own = _held(states[0])
    differing = [name for name in wanted if not torch.equal(wanted[name], own[name])]
    if not all(map(torch.equal, stands, losses)):
        shown = [[f"{float(loss):.9f}" for loss in each] for each in (losses, stands)]
        differing.insert(0, f"losses {' '.join(shown[0])} for {' '.join(shown[1])}")
    every = [""] * (dist.get_world_size() if dist.is_initialized() else 1)
    text = ", ".join(differing[:3])
    if dist.is_initialized():
        dist.all_gather_object(every, text)
    return next((f"rank {i}: {each}" for i, each in enumerate(every or [text]) if each), "")


def _held(state: Any) -> dict[str, torch.Tensor]:
    """Every tensor of every stage here."""
    named = [*state.model.named_parameters(), *state.model.named_buffers()]
    pieces = {f"piece {i} {h.name}": h.leaf for i, h in enumerate(state.pieces)}
    local = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in named}
    return {name: tensor.detach().clone() for name, tensor in (local | pieces).items()}


def main() -> None:
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    start("cpu")
    results: dict[str, str] = {}
    for folder in json.loads((where / "folders.json").read_text()):
        plan = plan_folder.read_plan(folder)
        world = dist.get_world_size() if dist.is_initialized() else 1
        assert plan.device_count == world, folder
        results[folder] = compared(folder)
    if not dist.is_initialized() or dist.get_rank() == 0:
        (where / "results.json").write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
