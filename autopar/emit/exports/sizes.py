"""A transformer's sizes in the fields of trainers that have such."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.emit.exports.setup import Figures, Setup


def sized(setup: Setup) -> Figures | None:
    """The sizes, where an architecture file or a model gave all of them."""
    figures = setup.figures
    return figures if figures is not None and figures.heads else None


def in_words(setup: Setup) -> str:
    """`` (32 layers, hidden 4096, 32 heads of 128, 8 of keys, ffn 14336, vocabulary 128256)``;
    empty where they are not known."""
    x = sized(setup)
    if x is None:
        return ""
    experts = f", {x.experts} experts of which {x.top_k}" if x.experts else ""
    return (
        f" ({x.layers} layers, hidden {x.hidden}, {x.heads} heads of {x.head_dim}, {x.kv_heads} of "
        f"keys, ffn {x.ffn}{experts}, vocabulary {x.vocab})"
    )


def megatron(x: Figures) -> Iterator[str]:
    """Arguments of Megatron-LM, what belongs together on one line."""
    yield f"--num-layers {x.layers} --hidden-size {x.hidden} --vocab-size {x.vocab}"
    yield f"--num-attention-heads {x.heads} --kv-channels {x.head_dim}"
    if x.kv_heads != x.heads:
        yield f"--group-query-attention --num-query-groups {x.kv_heads}"
    yield f"--ffn-hidden-size {x.ffn}" + (" --swiglu" if x.gated else "")
    if x.experts:
        yield f"--num-experts {x.experts} --moe-router-topk {x.top_k} --moe-ffn-hidden-size {x.ffn}"
    if not x.tied:
        yield "--untie-embeddings-and-output-weights"
    if not x.biases:
        yield "--disable-bias-linear"
    yield f"--position-embedding-type {'learned_absolute' if x.positions else 'rope'}"
    if as_llama(x):
        yield "--normalization RMSNorm"


def bridge(x: Figures) -> dict[str, Any]:
    """Fields of Megatron-Bridge's ``cfg.model``."""
    return {
        "num_layers": x.layers,
        "hidden_size": x.hidden,
        "ffn_hidden_size": x.ffn,
        "num_attention_heads": x.heads,
        "num_query_groups": x.kv_heads,
        "kv_channels": x.head_dim,
        "vocab_size": x.vocab,
        "share_embeddings_and_output_weights": x.tied,
    }


def maxtext(x: Figures) -> dict[str, Any]:
    """Fields of MaxText's ``base.yml``, for a model that has no name there."""
    experts: dict[str, Any] = {}
    if x.experts:
        experts = {
            "decoder_block": "mixtral",
            "num_experts": x.experts,
            "num_experts_per_tok": x.top_k,
            "base_moe_mlp_dim": x.ffn,  # which has no default, and must be base_mlp_dim
        }
    return {
        **experts,
        "base_num_decoder_layers": x.layers,
        "base_emb_dim": x.hidden,
        "base_num_query_heads": x.heads,
        "base_num_kv_heads": x.kv_heads,
        "head_dim": x.head_dim,
        "base_mlp_dim": x.ffn,
        "mlp_activations": ["silu", "linear"] if x.gated else ["gelu"],
        "vocab_size": x.vocab,
        "logits_via_embedding": x.tied,
    }


def levanter(x: Figures, sequence: int | None) -> dict[str, Any]:
    """Levanter's ``model:`` of type llama; its vocabulary is the tokenizer's. It trains on as many
    tokens as ``max_seq_len``, 2,048 where nothing is said."""
    return {
        "type": "llama",
        "num_layers": x.layers,
        "hidden_dim": x.hidden,
        "num_heads": x.heads,
        "num_kv_heads": x.kv_heads,
        "head_dim": x.head_dim,
        "intermediate_dim": x.ffn,
        "tie_word_embeddings": x.tied,
        **({"max_seq_len": sequence} if sequence else {}),
    }


def as_llama(x: Figures) -> bool:
    """Whether layers are made as Llama's: gated, rotary, without biases, so with RMSNorm."""
    return x.gated and not x.biases and not x.positions


def plain(x: Figures) -> bool:
    """A decoder that Llama's layers compute, sizes apart."""
    return as_llama(x) and not x.experts and not x.unusual
