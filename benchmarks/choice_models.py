"""Small models that have what the choices of a plan are about: layers whose dims 8 bits divide, a
loss over a vocabulary, biases, tied tables, cross attention, routed experts.

Some labels are ignored, of each sample another number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

BATCH, LENGTH, VOCABULARY = 8, 32, 112
WIDTH, WIDE, HEADS, LAYERS = 128, 256, 4, 2


def batch() -> dict[str, Tensor]:
    """input_ids, labels [BATCH, LENGTH]"""
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": labels.where(ids > labels // 4, -100)}


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, WIDTH] -> [b, s, WIDTH]"""
        y = self.attention_norm(x)
        q, k, v = (f(y).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))
        return out


class GPT(nn.Module):
    """With biases, learned positions, and a head that is the table of tokens where it is tied."""

    def __init__(self, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """input_ids, labels [b, s] -> the mean cross-entropy"""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


_DECODER: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}


def _llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**_DECODER, **settings}))


def _t5(**settings: Any) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    usual = {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "d_kv": WIDTH // HEADS,
        "d_ff": WIDE,
        "num_layers": LAYERS,
        "num_decoder_layers": LAYERS,
        "num_heads": HEADS,
        "dropout_rate": 0.0,
        "use_cache": False,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    return T5ForConditionalGeneration(T5Config(**{**usual, **settings}))


def _mixture(**settings: Any) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**{**_DECODER, **experts, **settings}))


def _shared(**settings: Any) -> Any:
    """Routed experts beside one that every token goes through."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    also = {"shared_expert_intermediate_size": 64, "output_router_logits": False}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**{**_DECODER, **experts, **also, **settings}))


def _workload(model: Any, precision: Any = "float32") -> autopar.Workload:
    return autopar.Workload(
        model=model, batch=batch, optimizer="adamw", clip_norm=1.0, precision=precision
    )


gpt, gpt_half = _workload(GPT), _workload(GPT, "bfloat16")
gpt_untied = _workload(lambda: GPT(tied=False, dropout=0.1))
llama, llama_half = _workload(_llama), _workload(_llama, "bfloat16")
llama_tied = _workload(lambda: _llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True))
t5, t5_half = _workload(_t5), _workload(_t5, "bfloat16")
t5_gated = _workload(
    lambda: _t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.1)
)
mixture, mixture_half = _workload(_mixture), _workload(_mixture, "bfloat16")
shared, shared_half = _workload(_shared), _workload(_shared, "bfloat16")
