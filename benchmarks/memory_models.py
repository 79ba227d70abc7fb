"""Models whose memory is rehearsed (`benchmarks.torch_memory`): planned, never allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import autopar

SAMPLES, LENGTH, VOCABULARY = 32, 2048, 32000


def tokens() -> Mapping[str, Tensor]:
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def short() -> Mapping[str, Tensor]:
    """A quarter of the tokens."""
    return {name: ids[:, : LENGTH // 4] for name, ids in tokens().items()}


def images() -> Mapping[str, Tensor]:
    return {
        "pixel_values": torch.zeros(256, 3, 224, 224),
        "labels": torch.zeros(256, dtype=torch.long),
    }


def _llama(dtype: torch.dtype, **more: Any) -> Any:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    config = LlamaConfig(**{**sizes, **heads, "use_cache": False, **more})
    return LlamaForCausalLM(config).to(dtype)


class Adapter(nn.Module):
    """A frozen linear layer with two trained ones of low rank beside it (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def _adapted() -> Any:
    model = _llama(torch.bfloat16).requires_grad_(False)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj, attention.v_proj = Adapter(attention.q_proj), Adapter(attention.v_proj)
    return model


def _gpt() -> Any:
    config = GPT2Config(n_layer=12, n_positions=LENGTH, vocab_size=VOCABULARY, use_cache=False)
    return GPT2LMHeadModel(config)


def _mixture() -> Any:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return MixtralForCausalLM(config).to(torch.bfloat16)


def _t5() -> Any:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=768,
        d_ff=3072,
        num_layers=12,
        num_heads=12,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _vit() -> Any:
    return ViTForImageClassification(ViTConfig())


class Mlp(nn.Module):
    """Layers with a residual, plain."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(24))
        self.head = nn.Linear(2048, 1000)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return nn.functional.cross_entropy(self.head(x), y)


def _rows() -> Mapping[str, Tensor]:
    return {"x": torch.zeros(32768, 2048), "y": torch.zeros(32768, dtype=torch.long)}


def _workload(model: Any, batch: Any = tokens, precision: Any = "bfloat16") -> autopar.Workload:
    return autopar.Workload(model=model, batch=batch, optimizer="adamw", precision=precision)


llama = _workload(lambda: _llama(torch.bfloat16))
llama_masters = _workload(lambda: _llama(torch.float32))
adapted = _workload(_adapted)
gpt = _workload(_gpt, precision="float32")
mixture = _workload(_mixture)
t5 = _workload(_t5, short)
vit = _workload(_vit, images)
mlp = _workload(Mlp, _rows, "float32")
