"""Llama 3 at its three published sizes, as Hugging Face builds it; planned, never allocated."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import autopar

LENGTH, BATCH = 8192, 64

# Llama Team (2024), "The Llama 3 Herd of Models", table 3.
_SIZES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "405b": {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
}


def _workload(size: str, stored: torch.dtype = torch.bfloat16) -> autopar.Workload:
    config = LlamaConfig(
        vocab_size=128256,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        use_cache=False,
        **_SIZES[size],
    )

    def batch() -> dict[str, Any]:
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return autopar.Workload(
        model=lambda: AutoModelForCausalLM.from_config(config, dtype=stored),
        batch=batch,
        optimizer="adamw",
        precision="bfloat16",
    )


llama_8b = _workload("8b")
llama_70b = _workload("70b")
llama_405b = _workload("405b")
llama_8b_float32, llama_70b_float32 = (_workload(size, torch.float32) for size in ("8b", "70b"))
"""Parameters and gradients in float32, computed in bfloat16."""
