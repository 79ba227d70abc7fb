"""A Llama and a T5 that are deep enough for every schedule: two stages for each of four ranks, and
eight microbatches for each of two data ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import autopar

BATCH, LENGTH, VOCABULARY = 16, 16, 101


def _batch() -> Mapping[str, Any]:
    """Some labels are ignored, of each sample another number."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": labels.where(ids > labels // 4, -100)}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=4,
            num_decoder_layers=4,
            num_heads=4,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


llama = autopar.Workload(model=_llama, batch=_batch, clip_norm=1.0)
t5 = autopar.Workload(model=_t5, batch=_batch, clip_norm=1.0)
