"""A Mixtral-like language model in plain PyTorch, its experts dispatched densely as in GShard.

Every token goes to its two best experts, as long as they have room (Lepikhin et al. 2021, "GShard",
algorithm 1; sizes of Jiang et al. 2024, "Mixtral of Experts").  Tokens are taken in groups of
``group``; of each group an expert takes at most ``capacity_factor * top_k * group / experts``.
With b sequences, n groups of t tokens, m features, e experts of f features and room for c tokens:

    dispatch, combine     b n t e c        which token sits where, and how much it counts
    expert's input        e b n c m  =  sum_t dispatch * tokens
    expert's output       e b n c m  =  ((silu(input w1) * input w3) w2)
    output                b n t m    =  sum_{e c} combine * expert's output
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class MoeConfig:
    """Table 1 of the Mixtral paper."""

    vocabulary: int = 32000
    dim: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    experts: int = 8
    top_k: int = 2
    group: int = 512
    capacity_factor: float = 1.25

    @property
    def capacity(self) -> int:
        """Tokens of a group that one expert takes."""
        return int(self.capacity_factor * self.top_k * self.group / self.experts)


class Attention(nn.Module):
    """Grouped-query attention, causal; positions are left to the embedding."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        width = config.dim // config.heads
        self.wq = nn.Linear(config.dim, config.heads * width, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.wo = nn.Linear(config.heads * width, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class Experts(nn.Module):
    """The router and the experts."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.dim, config.experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(config.experts, config.dim, config.hidden))
        self.w3 = nn.Parameter(torch.empty(config.experts, config.dim, config.hidden))
        self.w2 = nn.Parameter(torch.empty(config.experts, config.hidden, config.dim))
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        tokens = x.view(batch, -1, self.config.group, dim)
        dispatch, combine = self.route(tokens)
        taken = torch.einsum("bntec,bntm->ebncm", dispatch.to(x.dtype), tokens)
        up = torch.einsum("ebncm,emf->ebncf", taken, self.w3)
        gated = functional.silu(torch.einsum("ebncm,emf->ebncf", taken, self.w1)) * up
        done = torch.einsum("ebncf,efm->ebncm", gated, self.w2)
        out = torch.einsum("bntec,ebncm->bntm", combine.to(x.dtype), done)
        return out.reshape(batch, length, dim)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Dispatch and combine weights, both (b, n, t, e, c)."""
        experts, capacity = self.config.experts, self.config.capacity
        share = torch.softmax(self.gate(tokens), dim=-1)
        best, which = torch.topk(share, self.config.top_k, dim=-1)
        chosen = functional.one_hot(which, experts).sum(-2)  # 1 where a token wants an expert
        place = torch.cumsum(chosen, dim=2) - 1  # whose turn it is
        fits = (chosen > 0) & (place < capacity)
        seat = functional.one_hot(place.clamp(0, capacity - 1), capacity) * fits.unsqueeze(-1)
        weight = share * chosen
        weight = weight / best.sum(-1, keepdim=True)
        return seat, seat * weight.unsqueeze(-1)


class Layer(nn.Module):
    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.experts_norm = nn.RMSNorm(config.dim)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        routed: Tensor = x + self.experts(self.experts_norm(x))
        return routed


class Moe(nn.Module):
    """``forward(input_ids, labels)`` returns the loss; labels are the next tokens already."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
