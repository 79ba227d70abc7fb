"""Texts about images and sounds, their features in the places of tokens or attended to beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.census_configs import LENGTH
from benchmarks.census_tasks.draws import BATCH, Draws
from benchmarks.census_tasks.entry import Batch, Entry, Loss, config_of

GRID = 4
"""Patches of an image along a side, where its sizes come with it."""
_SMALL_TEXT = {"num_hidden_layers": 2}
_CLIP = {"image_size": 32, "patch_size": 8}
_LLAVA = {"vision_config": _CLIP, "text_config": _SMALL_TEXT}
_MERGED_PATCHES = {"image_size": 32, "patch_size": 8, "num_hidden_layers": 2}
_QUERIES = {
    "num_query_tokens": 4,
    "image_token_index": 90,
    "vision_config": {**_CLIP, "num_hidden_layers": 2},
    "qformer_config": {"num_hidden_layers": 2, "encoder_hidden_size": 32},
    "text_config": {"word_embed_proj_dim": 32, "num_hidden_layers": 2},
}
_QWEN_VISION = {
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "patch_size": 4,
    "hidden_size": 32,
}
_QWEN_TEXT = {
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}


def token_of(config: Any) -> int:
    """The token that stands for an image or a sound."""
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
    given = (getattr(config, name, None) for name in names)
    token: int = next(token for token in given if token is not None)
    return token


def written(draws: Draws, count: int, token: int) -> dict[str, Any]:
    """A text with ``count`` places of ``token`` behind its first two tokens, and its labels."""
    tokens = draws.tokens(LENGTH + count)
    tokens[:, 2 : 2 + count] = token
    return {"input_ids": tokens, "labels": draws.answers(LENGTH + count)}


def _placed(count: int, size: int = 32) -> Batch:
    def batch(draws: Draws, config: Any) -> dict[str, Any]:
        text = written(draws, count, token_of(config))
        return {**text, "pixel_values": draws.pixels(size)}

    return batch


def _sized(count: int) -> Batch:
    """An image and its sizes in pixels, the same of every image."""

    def batch(draws: Draws, config: Any) -> dict[str, Any]:
        return {**_placed(count)(draws, config), "image_sizes": draws.alike([32, 32])}

    return batch


def _tiled(count: int, tiles: int = 1, sized: bool = False) -> Batch:
    """Several images a sample; every one of real pixels."""

    def batch(draws: Draws, config: Any) -> dict[str, Any]:
        text = written(draws, count, token_of(config))
        given = {**text, "pixel_values": draws.normal(tiles, 3, 32, 32)}
        return given | ({"image_sizes": draws.alike([32, 32])} if sized else {})

    return batch


def _captioned(draws: Draws, config: Any) -> dict[str, Any]:
    given = {"input_ids": draws.tokens(), "pixel_values": draws.pixels()}
    return {**given, "labels": draws.answers()}


def _drawn_from_pixels(draws: Draws, config: Any) -> dict[str, Any]:
    return {"pixel_values": draws.pixels(), "labels": draws.answers()}


def _flat(draws: Draws, config: Any) -> dict[str, Any]:
    """Patches in rows, which begin with the place of the patch."""
    import torch

    grid = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).float()
    patches = torch.cat([draws.alike(grid), draws.normal(16, 3 * 64)], 2)
    return {"flattened_patches": patches, "labels": draws.answers()}


def _instructed(draws: Draws, config: Any) -> dict[str, Any]:
    given = _placed(4)(draws, config)
    return {**given, "qformer_input_ids": draws.tokens(6)}


def _patches(draws: Draws, config: Any) -> dict[str, Any]:
    """An image as a grid of patches, whose sizes the model is given in its own forward."""
    vision = config.vision_config
    frames = getattr(vision, "temporal_patch_size", 1)
    width = 3 * frames * vision.patch_size**2
    text = written(draws, (GRID // 2) ** 2, config.image_token_id)
    places = draws.alike([list(range(LENGTH + (GRID // 2) ** 2))] * 3)
    return {**text, "pixel_values": draws.normal(GRID**2, width), "position_ids": places}


def _of_known_grids(model: Any, batch: Mapping[str, Any]) -> Any:
    import torch

    pixels = batch["pixel_values"].flatten(0, 1)
    grid = torch.tensor([[1, GRID, GRID]] * BATCH)
    places = batch["position_ids"].transpose(0, 1)
    given = {**batch, "pixel_values": pixels, "position_ids": places}
    return model(**given, image_grid_thw=grid).loss


def _grids(draws: Draws, config: Any) -> dict[str, Any]:
    """As a processor gives it, one image a sample: its patches, its sizes, the kinds of tokens."""
    given = _patches(draws, config)
    del given["position_ids"]
    kinds = (given["input_ids"] == config.image_token_id).int()
    return {**given, "mm_token_type_ids": kinds, "image_grid_thw": draws.alike([1, GRID, GRID])}


def _of_given_grids(model: Any, batch: Mapping[str, Any]) -> Any:
    return model(**{**batch, "pixel_values": batch["pixel_values"].flatten(0, 1)}).loss


def _heard(count: int, frames: int, masked: bool = False) -> Batch:
    def batch(draws: Draws, config: Any) -> dict[str, Any]:
        bins = config.audio_config.num_mel_bins
        text = written(draws, count, token_of(config))
        mask = {"feature_attention_mask": draws.ones(frames)} if masked else {}
        return {**text, "input_features": draws.normal(bins, frames), **mask}

    return batch


def _drawn_and_written() -> Any:
    import transformers

    encoder = config_of(transformers.ViTConfig, {})
    decoder = config_of(transformers.GPT2Config, {})
    made = transformers.VisionEncoderDecoderConfig
    config = made.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def _made(
    name: str,
    batch: Batch,
    own: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    ending: str = "ForConditionalGeneration",
) -> Entry:
    return Entry(f"{name}{ending}", batch, own or {}, loss=loss)


_GRIDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {"vision_config": _QWEN_VISION, "text_config": _QWEN_TEXT}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "out_hidden_size": 32,
                "num_heads": 4,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            "text_config": _QWEN_TEXT,
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "out_hidden_size": 32,
                "num_heads": 4,
                "patch_size": 4,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            "text_config": _QWEN_TEXT,
        },
    ),
    "glm4v": (
        "Glm4v",
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "out_hidden_size": 32,
                "num_heads": 4,
                "patch_size": 4,
                "image_size": 16,
            },
            "text_config": _QWEN_TEXT,
        },
    ),
}


def _of_grids() -> dict[str, Entry]:
    made = {}
    for kind, (name, own) in _GRIDS.items():
        made[f"ImageTextToText/{kind}"] = _made(name, _patches, own, _of_known_grids)
        made[f"ImageTextToText/{kind}+sizes"] = _made(name, _grids, own, _of_given_grids)
    return made


ENTRIES: Mapping[str, Entry] = {
    **_of_grids(),
    "ImageTextToText/blip": _made(
        "Blip", _captioned, {"text_config": {"bos_token_id": 1, "sep_token_id": 2}}
    ),
    "ImageTextToText/blip-2": _made("Blip2", _placed(4), _QUERIES),
    "ImageTextToText/instructblip": _made("InstructBlip", _instructed, _QUERIES),
    "ImageTextToText/vision-encoder-decoder": Entry(
        "VisionEncoderDecoderModel", _drawn_from_pixels, config=_drawn_and_written
    ),
    "ImageTextToText/git": _made("Git", _captioned, ending="ForCausalLM"),
    "ImageTextToText/pix2struct": _made(
        "Pix2Struct", _flat, {"vision_config": {"patch_embed_hidden_size": 192}}
    ),
    "ImageTextToText/vipllava": _made(
        "VipLlava", _placed(16), {**_LLAVA, "vision_feature_layers": [-1, -2]}
    ),
    "ImageTextToText/llava_next": _made(
        "LlavaNext",
        _tiled(36, 2, sized=True),
        {**_LLAVA, "image_grid_pinpoints": [[32, 32]]},
    ),
    "ImageTextToText/llava_onevision": _made(
        "LlavaOnevision",
        _tiled(36, 2, sized=True),
        {**_LLAVA, "image_grid_pinpoints": [[32, 32]]},
    ),
    "ImageTextToText/idefics2": _made(
        "Idefics2",
        _tiled(4),
        {
            "vision_config": _MERGED_PATCHES,
            "perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 1},
            "text_config": _SMALL_TEXT,
        },
    ),
    "ImageTextToText/idefics3": _made(
        "Idefics3",
        _tiled(4),
        {"vision_config": _MERGED_PATCHES, "scale_factor": 2, "text_config": _SMALL_TEXT},
    ),
    "ImageTextToText/smolvlm": _made(
        "SmolVLM",
        _tiled(4),
        {"vision_config": _MERGED_PATCHES, "scale_factor": 2, "text_config": _SMALL_TEXT},
    ),
    "ImageTextToText/mistral3": _made(
        "Mistral3",
        _sized(4),
        {
            "image_token_index": 90,
            "vision_config": {**_MERGED_PATCHES, "head_dim": 8},
            "text_config": _SMALL_TEXT,
        },
    ),
    "ImageTextToText/got_ocr2": _made(
        "GotOcr2",
        _placed(1, 64),
        {
            "vision_config": {
                "image_size": 64,
                "patch_size": 16,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "global_attn_indexes": [1],
                "window_size": 2,
                "mlp_dim": 64,
            },
            "text_config": _SMALL_TEXT,
        },
    ),
    "ImageTextToText/cohere2_vision": _made(
        "Cohere2Vision",
        _placed(4),
        {"vision_config": _MERGED_PATCHES, "downsample_factor": 2, "text_config": _SMALL_TEXT},
    ),
    "ImageTextToText/ovis2": _made(
        "Ovis2",
        _placed(16),
        {
            "vision_config": {**_MERGED_PATCHES, "vocab_size": 64},
            "visual_indicator_token_ids": [91, 92, 93, 94, 95],
            "text_config": _SMALL_TEXT,
            "image_token_id": 90,
        },
    ),
    "ImageTextToText/florence2": _made(
        "Florence2",
        _placed(17),
        {
            "vision_config": {
                "depths": (1, 1),
                "patch_size": (7, 3),
                "patch_stride": (4, 2),
                "patch_padding": (3, 1),
                "patch_prenorm": (False, True),
                "embed_dim": (16, 32),
                "num_heads": (2, 4),
                "num_groups": (2, 4),
                "window_size": 4,
                "projection_dim": 32,
                "drop_path_rate": 0.0,
            },
            "text_config": {"encoder_layers": 2, "decoder_layers": 2},
        },
    ),
    "AudioTextToText/qwen2_audio": _made("Qwen2Audio", _heard(32, 128, masked=True)),
    "AudioTextToText/voxtral": _made("Voxtral", _heard(32, 128), {"audio_token_id": 90}),
}
