"""Which model types the census takes, and what the rules for tiny configs do not get right.

All causal types are the library's own list. The others are fixed here: over ten tasks, the oldest
and most used families of each and some of unusual build. More tasks are in `census_tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHERS: Mapping[str, tuple[str, ...]] = {
    "MaskedLM": (
        "albert",
        "bert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "fnet",
        "mobilebert",
        "modernbert",
        "mpnet",
    ),
    "TokenClassification": ("electra", "funnel"),
    "QuestionAnswering": ("roberta",),
    "SequenceClassification": ("squeezebert", "layoutlm"),
    "Seq2SeqLM": ("bart", "m2m_100", "mt5", "pegasus", "prophetnet", "t5"),
    "ImageClassification": (
        "beit",
        "convnextv2",
        "deit",
        "dinov2",
        "mobilenet_v2",
        "resnet",
        "swin",
        "swinv2",
        "vit",
    ),
    "MaskedImageModeling": ("vit_mae",),
    "SemanticSegmentation": ("segformer",),
    "AudioClassification": ("audio-spectrogram-transformer", "wav2vec2"),
    "SpeechSeq2Seq": ("whisper",),
    "Contrastive": ("clip",),
    "ImageTextToText": (
        "aya_vision",
        "gemma3",
        "internvl",
        "janus",
        "llava",
        "paligemma",
    ),
}
"""Model types by task; 41 in all."""
IMAGE_TOKENS: Mapping[str, int] = {
    "aya_vision": 4,
    "gemma3": 4,
    "internvl": 1,
    "janus": 16,
    "llava": 16,
    "paligemma": 16,
}
"""Tokens that stand for an image, by type."""
TYPED = ("gemma3", "paligemma")
"""Types that are told which tokens those are."""

_GROUPED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}

OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"mamba_n_heads": 8},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 4,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "convnextv2": {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, **_GROUPED},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "gemma3": {"mm_tokens_per_image": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16},
    "mamba2": {"num_heads": 8},
    "nemotron": {"num_key_value_heads": 4},
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {"text_config": _INDEXER},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 16),
        "attn_layers": ("local", "lsh", "local", "lsh"),
        "num_buckets": 4,
    },
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2]},
    "segformer": {
        "num_encoder_blocks": 2,
        "hidden_sizes": [16, 32],
        "depths": [2, 2],
        "sr_ratios": [4, 2],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [2, 4],
        "mlp_ratios": [2, 2],
    },
    "swin": _SWIN,
    "swinv2": _SWIN,
    "t5": {"decoder_start_token_id": 0},
    "wav2vec2": {
        "conv_dim": (32, 32),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "mask_time_prob": 0.0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "gemma3n_text": {
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
}
"""Settings of single types, over the rules."""
