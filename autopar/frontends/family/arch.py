"""The transformer family: parameters, matrices and attention work from a few architecture figures.

A layer is attention and a feed-forward part; the feed-forward part is one gated or plain MLP, or
`top_k` of `experts` of them beside `shared_experts`. Sizes of weights follow Vaswani et al. 2017,
grouped-query attention Ainslie et al. 2023, latent attention DeepSeek-V2 (2024), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class LatentAttention:
    """Ranks and head sizes of multi-head latent attention."""

    q_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Matrix:
    """One weight matrix of a layer: `inputs` x `outputs`, `count` of them, `used` per token."""

    name: str
    inputs: int
    outputs: int
    split: str
    """'out' or 'in': the dim that tensor parallelism splits; 'whole': it does not."""
    count: int = 1
    used: float = 1.0

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True)
class Arch:
    """Architecture figures of a decoder (or encoder, with `causal=False`)."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    gated: bool = True
    head_dim: int = 0
    """0: hidden / heads."""
    experts: int = 0
    top_k: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    """Layers of a mixture-of-experts model that have one MLP of `dense_ffn` instead."""
    dense_ffn: int = 0
    tied: bool = False
    causal: bool = True
    positions: bool = False
    """Learned position embeddings; without them queries and keys are turned by angles."""
    biases: bool | None = None
    """Whether products add vectors; None: those of a plain MLP's model do."""
    latent: LatentAttention | None = None
    windowed_layers: int = 0
    """Layers whose attention sees only `window` tokens."""
    window: int = 0

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def value_dim(self) -> int:
        return self.latent.value_dim if self.latent else self.dim

    @property
    def has_biases(self) -> bool:
        return not self.gated if self.biases is None else self.biases

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.is_moe else 0

    @cached_property
    def attention(self) -> tuple[Matrix, ...]:
        """The attention's weight matrices of one layer."""
        h, a, d = self.hidden, self.heads, self.dim
        if self.latent is None:
            return (
                Matrix("qkv", h, (a + 2 * self.kv_heads) * d, "out"),
                Matrix("proj", a * d, h, "in"),
            )
        m = self.latent
        down = m.kv_rank + m.rope_dim + m.q_rank
        query = Matrix("q_up", m.q_rank or h, a * d, "out")
        return (
            Matrix("down", h, down, "whole"),
            query,
            Matrix("kv_up", m.kv_rank, a * (d - m.rope_dim + m.value_dim), "out"),
            Matrix("proj", a * m.value_dim, h, "in"),
        )

    def mlp(self, width: int, count: int = 1, used: float = 1.0) -> tuple[Matrix, ...]:
        """The matrices of MLPs of `width`."""
        up = 2 if self.gated else 1
        return (
            Matrix("up", self.hidden, up * width, "out", count, used),
            Matrix("down", width, self.hidden, "in", count, used),
        )

    @cached_property
    def dense_mlp(self) -> tuple[Matrix, ...]:
        """The MLP of a dense layer."""
        return self.mlp(self.dense_ffn or self.ffn if self.is_moe else self.ffn)

    @cached_property
    def shared_mlp(self) -> tuple[Matrix, ...]:
        """The experts that every token visits, as one MLP."""
        return self.mlp(self.ffn * self.shared_experts) if self.shared_experts else ()

    @cached_property
    def expert_mlp(self) -> tuple[Matrix, ...]:
        """All routed experts of one layer."""
        return self.mlp(self.ffn, self.experts, float(self.top_k)) if self.is_moe else ()

    @cached_property
    def dense_layer_parameters(self) -> int:
        """Parameters of a layer with one MLP, norms left out."""
        return sum(m.parameters for m in (*self.attention, *self.dense_mlp))

    @cached_property
    def moe_layer_parameters(self) -> tuple[int, int]:
        """(outside routed experts, in routed experts) of a layer with experts."""
        shared = sum(m.parameters for m in (*self.attention, *self.shared_mlp))
        routed = sum(m.parameters for m in self.expert_mlp)
        return shared + self.hidden * self.experts, routed

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token and position tables, without the output head."""
        return self.vocab * self.hidden + (self.seq * self.hidden if self.positions else 0)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head beyond those of a tied embedding."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, biases and norms counted as two vectors a layer."""
        dense = (self.layers - self.moe_layers) * self.dense_layer_parameters
        norms = 2 * self.hidden * self.layers
        return (
            dense
            + self.moe_layers * sum(self.moe_layer_parameters)
            + norms
            + self.embedding_parameters
            + self.head_parameters
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets in matrix products, the output head included."""
        dense = (self.layers - self.moe_layers) * self.dense_layer_parameters
        outside, routed = self.moe_layer_parameters
        used = routed * self.top_k // self.experts if self.is_moe else 0
        return dense + self.moe_layers * (outside + used) + self.vocab * self.hidden

    @property
    def mean_context(self) -> float:
        """Keys that a layer's attention spans, averaged over layers (the mask not counted)."""
        seen = min(self.window or self.seq, self.seq)
        return (self.windowed_layers * seen + (self.layers - self.windowed_layers) * self.seq) / (
            self.layers
        )

    def flops_per_token(self, causal_counted: bool = True) -> float:
        """Forward and backward FLOPs of one token: 6 N + 6 L s (d_qk + d_v) a / 2 if causal.

        Megatron-LM (Narayanan et al. 2021, equation 3) counts the whole attention matrix,
        which `causal_counted=False` gives.
        """
        half = 0.5 if self.causal and causal_counted else 1.0
        attention = 6 * self.layers * self.mean_context * self.heads * (self.dim + self.value_dim)
        return 6.0 * self.active_parameters + half * attention

    def wide_flops_per_token(self) -> float:
        """Those of them that stay in 16 bits where products are narrower: attention, the head."""
        layers = 6.0 * (self.active_parameters - self.vocab * self.hidden)
        return self.flops_per_token() - layers
