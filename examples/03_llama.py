"""03: a Hugging Face Llama, built from a config file and not changed in any way.

    autopar plan examples/03_llama.py --cluster local -o plan
    autopar run plan --steps 20
    autopar verify plan

A class that is not ours cannot be decorated; a `Workload` says the same from outside. Any causal
language model of the library goes the same way: give its ``config.json``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import autopar

BATCH, LENGTH = 16, 64
CONFIG = LlamaConfig.from_json_file(str(Path(__file__).with_suffix(".json")))


def model() -> nn.Module:
    return AutoModelForCausalLM.from_config(CONFIG)


def batch(step: int = 0) -> dict[str, Tensor]:
    """Sequences that count upwards from a random byte; the library shifts the labels itself."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(0, CONFIG.vocab_size, (BATCH, 1), generator=generator)
    tokens = (first + torch.arange(LENGTH)) % CONFIG.vocab_size
    return {"input_ids": tokens, "labels": tokens}


workload = autopar.Workload(model=model, batch=batch, optimizer="adamw")
