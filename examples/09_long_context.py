"""09: a Llama on a context that is longer than the batch has samples for the devices.

One sequence on four processes: ranks cannot have samples of their own, so they share it.

    autopar plan examples/09_long_context.py --cluster examples/clusters/cpu_4.yaml -o plan
    autopar verify plan

The plan says how: ``cp`` ranks have pieces of the sequence in zigzag, and attention sees the rest
by heads, by gathered keys and values, or as they pass around a ring. To choose yourself:

    --fix cp=4                     the search decides how attention runs
    --fix cp_ring=2,cp_head=2      rows over two ranks, heads over two
    --fix cp=2,tp=2
"""

from __future__ import annotations

import functools
import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

VOCABULARY = 256  # a token is a byte
LENGTH = 2048

CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=LENGTH,
    use_cache=False,
)


@functools.cache
def text() -> bytes:
    """Modules of the standard library, one after the other."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join(file.read_bytes() for file in sorted(folder.glob("a*.py")))


def batch(step: int = 0) -> dict[str, Tensor]:
    """One long sequence; the model shifts labels by itself, the whole before it is cut."""
    start = random.Random(step).randrange(len(text()) - LENGTH)
    tokens = torch.tensor([list(text()[start : start + LENGTH])])
    return {"input_ids": tokens, "labels": tokens}


workload = autopar.Workload(
    model=lambda: LlamaForCausalLM(CONFIG), batch=batch, optimizer="adamw", learning_rate=3e-3
)
