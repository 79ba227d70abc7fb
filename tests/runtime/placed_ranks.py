"""What four ranks do with experts that lie by load under one plan, by another load under the next,
and in order under a third; `tests.runtime.test_placed_ranks` reads what they saw."""

from __future__ import annotations

import copy
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.training.load import load, start

CONFIG = MixtralConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=16,
    router_aux_loss_coef=0.1,
    use_cache=False,
)
LAYERS = tuple(f"model.layers.{i}.mlp.experts" for i in range(2))


def batch(step: int = 0) -> dict[str, Tensor]:
    """input_ids, labels [8, 16]"""
    drawn = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": drawn, "labels": drawn}


def workload(balanced: bool) -> Workload:
    """``balanced``: with the loss for that, which goes by the model's numbers of experts."""
    config = copy.deepcopy(CONFIG)
    config.output_router_logits = balanced
    return Workload(
        model=lambda: MixtralForCausalLM(config),
        batch=batch,
        optimizer="adamw",
        learning_rate=1e-2,
        clip_norm=1.0,
    )


BALANCED, PLAIN = workload(True), workload(False)
STEPS = 2
PLANS = ("placed", "placed otherwise", "in order")


def made(folder: Path, name: str) -> Any:
    return load(folder / name, check_model=False)


def trained(folder: Path) -> dict[str, list[float]]:
    """Losses of the same steps from the same seed; what each plan saves before the last of them,
    and what plans that go on from it, or read its weights and write them again, have there."""
    seen = {}
    for place, writer in enumerate(PLANS):
        trainer = made(folder, writer)
        seen[writer] = [float(trainer.step(batch(step))) for step in range(STEPS)]
        trainer.save(folder / f"saved {writer}")
        trainer.save_weights(folder / f"weights {writer}", config=CONFIG)
        seen[writer].append(float(trainer.step(batch(STEPS))))
        reader = PLANS[(place + 1) % len(PLANS)]
        other = made(folder, reader)
        other.load(folder / f"saved {writer}")
        seen[f"{writer}, then {reader}"] = [float(other.step(batch(STEPS)))]
        other.load_weights(folder / f"weights {writer}")
        other.save_weights(folder / f"again {writer}", config=CONFIG)
    return seen


def main() -> None:
    folder = Path(sys.argv[1])
    start("cpu", timeout_s=60)
    try:
        seen: Any = trained(folder)
    except Exception:  # whatever it raises: told
        seen = {"failed": traceback.format_exc()}
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps({"trained": seen}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
