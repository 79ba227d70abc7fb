"""10: a mixture of experts, whose experts are spread over ranks.

    autopar plan examples/10_experts.py --cluster examples/clusters/cpu_4.yaml -o plan
    autopar verify plan

Each token goes to two of eight experts. Ranks that split the batch elsewhere may have experts of
their own: tokens travel to them and back (``ep``, whose ranks are those of ``dp_shard``, ``cp`` or
``tp``), or ranks take the routes to their own experts of tokens that all have. To choose yourself:

    --fix ep=4                     two experts a rank
    --fix ep=2,tp=2                experts over two ranks, attention over the two others as well
    --fix ep=4,cp=2,tp=2           over the ranks that split sequences and heads elsewhere
"""

from __future__ import annotations

import functools
import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import autopar

VOCABULARY = 256  # a token is a byte
BATCH, LENGTH = 16, 64

CONFIG = MixtralConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=LENGTH,
    output_router_logits=False,
    use_cache=False,
)


@functools.cache
def text() -> bytes:
    """Modules of the standard library, one after the other."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join(file.read_bytes() for file in sorted(folder.glob("a*.py")))


def batch(step: int = 0) -> dict[str, Tensor]:
    """BATCH places in the text; the model shifts labels by itself."""
    places = random.Random(step)
    starts = [places.randrange(len(text()) - LENGTH) for _ in range(BATCH)]
    tokens = torch.tensor([list(text()[start : start + LENGTH]) for start in starts])
    return {"input_ids": tokens, "labels": tokens}


workload = autopar.Workload(
    model=lambda: MixtralForCausalLM(CONFIG), batch=batch, optimizer="adamw", learning_rate=3e-3
)
