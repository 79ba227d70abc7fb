"""The models of `benchmarks.own_problems`, at full size and never allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import autopar

SEQUENCES, IMAGES = 512, 2048
"""Samples of a batch: enough for every device of the largest mesh."""


def _tokens(length: int) -> Callable[[], Mapping[str, Any]]:
    def batch() -> Mapping[str, Any]:
        import torch

        ids = torch.zeros(SEQUENCES, length, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    return batch


def _images() -> Mapping[str, Any]:
    import torch

    labels = torch.zeros(IMAGES, dtype=torch.long)
    return {"pixel_values": torch.zeros(IMAGES, 3, 224, 224), "labels": labels}


def _library(
    model: str, config: str, batch: Callable[[], Mapping[str, Any]], **settings: Any
) -> Callable[[], autopar.Workload]:
    def build() -> Any:
        import torch
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made.to(torch.bfloat16)

    def workload() -> autopar.Workload:
        return autopar.Workload(model=build, batch=batch, optimizer="adamw", precision="bfloat16")

    return workload


def _moe() -> autopar.Workload:
    from benchmarks.moe import Moe, MoeConfig

    def build() -> Any:
        import torch

        return Moe(MoeConfig()).to(torch.bfloat16)

    def batch() -> Mapping[str, Any]:
        import torch

        ids = torch.zeros(SEQUENCES, 4096, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    return autopar.Workload(model=build, batch=batch, optimizer="adamw", precision="bfloat16")


MODELS: Mapping[str, Callable[[], autopar.Workload]] = {
    # Llama Team (2024), "The Llama 3 Herd of Models", table 3.
    "Llama-3-8B": _library(
        "LlamaForCausalLM",
        "LlamaConfig",
        _tokens(8192),
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        use_cache=False,
    ),
    # Sizes of Jiang et al. (2024), "Mixtral of Experts", table 1; dispatch as in GShard.
    "Mixtral-like": _moe,
    # Raffel et al. (2020), "Exploring the Limits of Transfer Learning", section 3.7.
    "T5-large": _library(
        "T5ForConditionalGeneration",
        "T5Config",
        _tokens(512),
        vocab_size=32128,
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=24,
        num_decoder_layers=24,
        num_heads=16,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    ),
    # He et al. (2016), "Deep Residual Learning for Image Recognition", table 1.
    "ResNet-50": _library("ResNetForImageClassification", "ResNetConfig", _images, num_labels=1000),
    # Brown et al. (2020), "Language Models are Few-Shot Learners", table 2.1.
    "GPT-3-6.7B": _library(
        "GPT2LMHeadModel",
        "GPT2Config",
        _tokens(2048),
        vocab_size=50304,
        n_embd=4096,
        n_layer=32,
        n_head=32,
        n_positions=2048,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}
