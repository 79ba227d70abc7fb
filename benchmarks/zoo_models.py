"""Small models of many families, each a `Workload`, for verification and for the tests.

Every one is unchanged library code built from a config; sizes are such that four devices can split
batch, heads and hidden dims, with odd ones (a vocabulary of 101, two key-value heads) on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import autopar

BATCH, LENGTH, VOCAB = 8, 16, 101
Maker = Callable[[], autopar.Workload]


def _ids(**more: int) -> Callable[[], Mapping[str, Any]]:
    """Token ids and labels that differ, some labels ignored; ``more`` names further inputs."""

    def batch() -> Mapping[str, Any]:
        import torch

        generator = torch.Generator().manual_seed(0)

        def draw(top: int) -> Any:
            return torch.randint(0, top, (BATCH, LENGTH), generator=generator)

        labels = draw(VOCAB)
        labels[:, :2] = -100
        labels[0, :9] = -100  # unequal counts over the ranks
        return {"input_ids": draw(VOCAB), "labels": labels} | {k: draw(v) for k, v in more.items()}

    return batch


def _packed() -> Mapping[str, Any]:
    """`_ids`, with documents of several lengths in each sample, by where positions begin again."""
    import torch

    lengths = [(3, 9, 4), (LENGTH,), (1, 1, 14), (8, 8)] * (BATCH // 4)
    places = [[i for length in each for i in range(length)] for each in lengths]
    return {**_ids()(), "position_ids": torch.tensor(places)}


def _images(classes: int = 8, size: int = 32) -> Callable[[], Mapping[str, Any]]:
    def batch() -> Mapping[str, Any]:
        import torch

        generator = torch.Generator().manual_seed(0)
        return {
            "pixel_values": torch.randn(BATCH, 3, size, size, generator=generator),
            "labels": torch.randint(0, classes, (BATCH,), generator=generator),
        }

    return batch


def _library(
    model: str, config: str, batch: Callable[[], Mapping[str, Any]], **settings: Any
) -> Maker:
    """A Hugging Face model class from a config class with ``settings``."""

    def build() -> Any:
        import transformers

        made = getattr(transformers, config)(**settings)
        return getattr(transformers, model)(made)

    def workload() -> autopar.Workload:
        return autopar.Workload(model=build, batch=batch, optimizer="adamw", clip_norm=1.0)

    return workload


_DECODER: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 8,
}

EXPERTS: Mapping[str, tuple[tuple[str, str], Mapping[str, Any]]] = {
    "mixtral": (("MixtralForCausalLM", "MixtralConfig"), {"num_local_experts": 4}),
    "olmoe": (
        ("OlmoeForCausalLM", "OlmoeConfig"),
        {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False},
    ),
    "qwen2_moe": (
        ("Qwen2MoeForCausalLM", "Qwen2MoeConfig"),
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "granitemoe": (
        ("GraniteMoeForCausalLM", "GraniteMoeConfig"),
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        ("GptOssForCausalLM", "GptOssConfig"),
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
    "deepseek_v3": (
        ("DeepseekV3ForCausalLM", "DeepseekV3Config"),
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
}
"""Model and config classes of mixtures of experts, and what each sets beside `_DECODER`."""


def routed(family: str, batch: Callable[[], Mapping[str, Any]] | None = None, **own: Any) -> Maker:
    """A model of `EXPERTS` with further settings, on a batch of its own where one is given."""
    classes, settings = EXPERTS[family]
    return _library(*classes, batch or _ids(), **{**_DECODER, **settings, **own})


ZOO: Mapping[str, Maker] = {
    "gpt2": _library(
        "GPT2LMHeadModel",
        "GPT2Config",
        _ids(),
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "llama": _library("LlamaForCausalLM", "LlamaConfig", _ids(), **_DECODER),
    "llama_tied": _library(
        "LlamaForCausalLM", "LlamaConfig", _ids(), **_DECODER, tie_word_embeddings=True
    ),
    "mistral": _library("MistralForCausalLM", "MistralConfig", _ids(), **_DECODER, head_dim=8),
    "qwen2": _library("Qwen2ForCausalLM", "Qwen2Config", _ids(), **_DECODER),
    "qwen3": _library("Qwen3ForCausalLM", "Qwen3Config", _ids(), **_DECODER, head_dim=8),
    "gemma3": _library(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _ids(),
        **{**_DECODER, "num_hidden_layers": 4},
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 1
        + ["sliding_attention"],
    ),
    "olmo2": _library("Olmo2ForCausalLM", "Olmo2Config", _ids(), **_DECODER),
    "granite": _library("GraniteForCausalLM", "GraniteConfig", _ids(), **_DECODER),
    "phi": _library("PhiForCausalLM", "PhiConfig", _ids(), **_DECODER),
    "gpt_neox": _library(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        _ids(),
        **{k: v for k, v in _DECODER.items() if k != "num_key_value_heads"},
    ),
    "opt": _library(
        "OPTForCausalLM",
        "OPTConfig",
        _ids(),
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        dropout=0.0,
        use_cache=False,
        pad_token_id=0,
    ),
    "bloom": _library(
        "BloomForCausalLM",
        "BloomConfig",
        _ids(),
        vocab_size=VOCAB,
        hidden_size=32,
        n_layer=3,
        n_head=4,
        use_cache=False,
    ),
    "bert": _library("BertForMaskedLM", "BertConfig", _ids(), **_ENCODER),
    "roberta": _library("RobertaForMaskedLM", "RobertaConfig", _ids(), **_ENCODER, pad_token_id=0),
    "t5": _library(
        "T5ForConditionalGeneration",
        "T5Config",
        _ids(),
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    ),
    "vit": _library("ViTForImageClassification", "ViTConfig", _images(), **_VISION),
    "resnet": _library(
        "ResNetForImageClassification",
        "ResNetConfig",
        _images(),
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[2, 2],
        layer_type="basic",
        num_labels=8,
    ),
    "convnext": _library(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        _images(),
        hidden_sizes=[16, 32],
        depths=[2, 2],
        num_stages=2,
        num_labels=8,
    ),
    **{name: routed(name) for name in EXPERTS},
}

BALANCED: Mapping[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
MORE: Mapping[str, Maker] = {
    "mixtral_balanced": routed("mixtral", **BALANCED),
    "qwen3_moe": _library(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _ids(),
        **{**_DECODER, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2},
        moe_intermediate_size=48,
    ),
    "llama4": _library(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _ids(),
        **{**_DECODER, "num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 4},
        intermediate_size_mlp=64,
        num_experts_per_tok=1,
        attention_chunk_size=8,
    ),
}
"""Beside the zoo, for layouts whose ranks share sequences or experts."""
MASKED: Mapping[str, Maker] = {
    "llama_packed": _library("LlamaForCausalLM", "LlamaConfig", _packed, **_DECODER),
    "mistral_windowed": _library(
        "MistralForCausalLM", "MistralConfig", _ids(), **_DECODER, head_dim=8, sliding_window=3
    ),
}
FAMILIES: Mapping[str, Maker] = {**ZOO, **MORE, **MASKED}
