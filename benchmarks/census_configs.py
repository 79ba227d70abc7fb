"""Tiny configs of a library's model types, made by rule from their defaults.

Every number of a config is brought down by what its name says, never up, and nested configs alike.
Numbers that come in lists are left to the config class, which derives them from the counts. What no
rule gets right stands in `census_types` as data.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

VOCAB, LENGTH = 101, 16
LAYERS, WIDTH, HEADS, HEAD_DIM = 4, 32, 4, 8
FIRST_SPECIAL = 90
"""Token ids of a batch lie below; ids that stand for images and the like above."""

RULES: tuple[tuple[str, int], ...] = (
    (r"(\w+_)?vocab_size(_per_layer_input)?|vocab|unpadded_vocab_size", VOCAB),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_\w+_positions", 64),
    (r"original_max_position_embeddings", 32),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|emb_dim|embedding_(size|dim)|decoder_hidden_size"
     r"|encoder_hidden_size|word_embed_proj_dim|hidden_dim|projection_dim|lru_width|true_hidden_size"
     r"|intra_bottleneck_size|backbone_hidden_size|input_embedding_size|classifier_proj_size"
     r"|ple_embed_dim|router_hidden_size|output_embedding_size|d_embed|mamba_d_ssm", WIDTH),
    (r"\w*(intermediate_size|ffn_dim|ffn_hidden_size|inner_dim|n_inner|d_ff|dff|dim_ff)\w*"
     r"|feed_forward_size|d_inner|ffn_size", 2 * WIDTH),
    (r"(num_)?(\w+_)?hidden_layers|n_layers?|num_layers|\w*(encoder|decoder)_layers|num_blocks",
     LAYERS),
    (r"(swa_)?num_key_value_heads|num_kv_heads|multi_query_group_num|linear_num_key_heads", 2),
    (r"(\w+_)?num_(\w+_)?heads|n_heads?|\w*attention_heads|index_n_heads|linear_num_\w*heads"
     r"|n_mamba_heads|mamba_n_heads", HEADS),
    (r"\w*head_dim|dim_head|d_kv|d_head|kv_channels|mamba_d_head|attention_head_size|rotary_dim"
     r"|qk_(rope|nope)_head_dim|linear_(key|value|)_?head_dim|attention_head_dim", HEAD_DIM),
    (r"\w*lora_rank|\w*_rank|time_step_rank|mamba_dt_rank|hc_lowrank", 8),
    (r"n_group|topk_group", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"(num|n)_(\w+_)?experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|top_k|num_experts_per_token|index_topk_blocks", 2),
    (r"index_topk", 8),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"moe_layer_end_index", LAYERS - 1),
    (r"\w*sliding_window(_size)?|window_size|local_attention|attention_window_size"
     r"|\w*chunk_size|block_size|index_block_size|attention_chunk_size|local_attention_window_len"
     r"|\w*attn_chunk_length", 8),
    (r"sliding_window_pattern|\w*_every_n_layers|no_rope_layer_interval|\w*_layer_period"
     r"|layer_group_size|n_layers_per_attn_res_block", 2),
    (r"\w*_layer_offset", 1),
    (r"mamba_d_state|state_size|ssm_state_size", 8),
    (r"(mamba_)?n_groups|mamba_ngroups", 1),
    (r"num_random_blocks", 1),
    (r"d_rel|rel_extent|linear_num_heads", 4),
    (r"image_size|crop_size", 32),
    (r"patch_size", 8),
    (r"num_labels", 8),
    (r"query_pre_attn_scalar", HEAD_DIM),
    (r"num_kv_shared_layers|num_nextn_predict_layers", 0),
    (r"max_window_layers", 2),
)  # fmt: skip
_RULES = tuple((re.compile(pattern), size) for pattern, size in RULES)
_SPECIAL = re.compile(r"\w+_(token_)?(id|index)")


def size_of(name: str) -> int | None:
    """What a number of that name is brought down to; None: it stays."""
    return next((size for pattern, size in _RULES if pattern.fullmatch(name)), None)


def tiny(config: type[Any], own: Mapping[str, Any]) -> Any:
    """A config of the class ``config`` with small numbers; ``own`` are settings that hold as given.

    A dict under the name of a nested config holds settings of that one.
    """
    return config(**_settings(config, own))


def _settings(config: type[Any], own: Mapping[str, Any]) -> dict[str, Any]:
    declared = _declared(config)
    default = _defaults(config) or declared
    settings: dict[str, Any] = {}
    special = FIRST_SPECIAL
    for name in _names(config):
        value = default.get(name, declared.get(name))
        if name == "head_dim" and value is None:
            settings[name] = HEAD_DIM
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            settings[name] = ("pad_token_id", "bos_token_id", "eos_token_id").index(name)
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif _SPECIAL.fullmatch(name):
            if value >= VOCAB:
                settings[name] = special
                special += 1
        elif (size := size_of(name)) is not None and value > size:
            settings[name] = size
    if settings.get("num_key_value_heads") and default.get("num_key_value_heads") == default.get(
        "num_attention_heads"
    ):
        settings["num_key_value_heads"] = settings.get("num_attention_heads", HEADS)
    if "use_cache" in _names(config):
        settings["use_cache"] = False
    for name, inner in config.sub_configs.items():
        given = default.get(name)
        inner_own = own.get(name, {})
        if given is None and not inner_own:
            continue
        inner_class: Any = type(given) if dataclasses.is_dataclass(given) else inner
        settings[name] = _settings(inner_class, inner_own)
        if "model_type" in vars(inner_class) or hasattr(inner_class, "model_type"):
            settings[name]["model_type"] = inner_class.model_type
    return settings | {name: value for name, value in own.items() if name not in config.sub_configs}


def _names(config: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def _defaults(config: type[Any]) -> Mapping[str, Any]:
    """What the class sets by itself, derived numbers too; empty where it needs more."""
    try:
        defaults: Mapping[str, Any] = vars(config())
    except (TypeError, ValueError, AttributeError):
        return {}
    return defaults


def _declared(config: type[Any]) -> Mapping[str, Any]:
    """The fields' own defaults; one that stands for another has no value in a config."""
    fields = dataclasses.fields(config)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
