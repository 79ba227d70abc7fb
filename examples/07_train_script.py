"""07: a training script of one's own; ten lines of it are autopar's.

    torchrun --nproc-per-node 4 examples/07_train_script.py --fix dp_shard=2,tp=2

SIGTERM lets it save and end. Started again, on as many processes as there are then and by the plan
that is best for them, it goes on where it was. A small Llama learns the standard library's source.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

VOCABULARY, LENGTH = 256, 64  # a token is a byte


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", default="local", help="a file; local: this machine")
    parser.add_argument("--fix", default="", help="what is decided already: tp=2,zero=3")
    parser.add_argument("--output", type=Path, default=Path("job"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a step, in all")
    parser.add_argument("--samples", type=int, default=330)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--evaluate-every", type=int, default=20)
    return parser.parse_args()


def text(start: int, samples: int) -> list[dict[str, Tensor]]:
    """Stretches of LENGTH bytes of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    whole = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    rows = torch.tensor(list(whole[start * LENGTH : (start + samples) * LENGTH]))
    return [{"input_ids": row, "labels": row} for row in rows.view(samples, LENGTH)]


def groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Matrices decay, norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def cosine(step: int, warmup: int, steps: int) -> float:
    """The share of the learning rate: up over ``warmup`` steps, then down to nothing."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same weights on all ranks
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main(args: argparse.Namespace) -> None:
    out, first = args.output, os.environ.get("RANK", "0") == "0"
    model = llama().to(getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    batch = {n: torch.stack([v] * args.batch_size) for n, v in text(0, 1)[0].items()}

    clips = {"clip_norm": args.clip_norm}
    plan = autopar.plan(model, batch, args.cluster, args.fix, out / "plan", **clips)
    trainer = autopar.load(plan, model=model, optimizer=optimizer)
    train = trainer.loader(text(0, args.samples), shuffle=True)
    held_out = trainer.loader(text(args.samples, 50), batch_size=50)

    steps = args.epochs * len(train)
    schedule = LambdaLR(optimizer, lambda step: cosine(step, args.warmup, steps))
    trainer.register_for_checkpointing(schedule)
    trainer.keep_checkpoints(out / "checkpoints", every=args.save_every, keep=2)

    while train.epoch < args.epochs:
        for batch in train:
            loss = trainer.step(batch)
            schedule.step()
            step = schedule.last_epoch
            if first:
                print(f"step {step}  loss {float(loss)}", flush=True)
            if step % args.evaluate_every == 0:
                losses = [float(trainer.evaluate(batch)) for batch in held_out]
                if first:
                    print(f"step {step}  held out {sum(losses) / len(losses)}", flush=True)
    trainer.save_weights(out / "weights", model.config)


if __name__ == "__main__":
    main(arguments())
