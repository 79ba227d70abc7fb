"""11: a kernel of one's own in the middle of a gated feed-forward.

    autopar plan examples/11_own_kernel.py --cluster examples/clusters/cpu_4.yaml -o plan
    autopar verify plan

`register_kernel` says what ``swiglu`` computes (``silu(gate) * up``, wherever the model has that)
and where it runs. Plans then call it where no kernel is faster: ``plan/program/model.py`` has the
line, ``plan.json`` the choice under ``kernels``. `verify` computes it with torch's ops in float64,
and as it is in float32. Without it:

    --fix kernels=torch
"""

from __future__ import annotations

import functools
import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

VOCABULARY = 256  # a token is a byte
BATCH, LENGTH = 16, 64

CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    use_cache=False,
)


def swiglu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """gate, up [..., f] -> [..., f]: one pass each way, and nothing kept but what was given."""
    if activation != "silu":
        raise ValueError(f"swiglu knows silu alone, and the model has {activation}")
    result: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate.sigmoid().mul_(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        share = gate.sigmoid()
        slope = (1 - share).mul_(gate).add_(1).mul_(share)
        return slope.mul_(up).mul_(grad), share.mul_(gate).mul_(grad)


autopar.register_kernel("gated_activation", swiglu, devices=("cpu",))


@functools.cache
def text() -> bytes:
    """Modules of the standard library, one after the other."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join(file.read_bytes() for file in sorted(folder.glob("b*.py")))


def batch(step: int = 0) -> dict[str, Tensor]:
    """BATCH places in the text; the model shifts labels by itself."""
    places = random.Random(step)
    starts = [places.randrange(len(text()) - LENGTH) for _ in range(BATCH)]
    tokens = torch.tensor([list(text()[start : start + LENGTH]) for start in starts])
    return {"input_ids": tokens, "labels": tokens}


llama = autopar.Workload(
    model=lambda: LlamaForCausalLM(CONFIG), batch=batch, optimizer="adamw", learning_rate=3e-3
)
