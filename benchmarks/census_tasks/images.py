"""Images of a class, and images of which patches are hidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.census_tasks.draws import CLASSES, Draws
from benchmarks.census_tasks.entry import Batch, Entry
from benchmarks.census_tasks.pairs import PATCHES, patches

Types = Mapping[str, tuple[str, int, Mapping[str, Any]]]
"""By model type: what its classes' names begin with, pixels along a side, and settings."""
_SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_FOCAL = {
    "embed_dim": 16,
    "hidden_sizes": [16, 32],
    "depths": [2, 2],
    "focal_levels": [2, 2],
    "focal_windows": [3, 3],
    "patch_size": 4,
}
_HGNET = {
    "embedding_size": 16,
    "stem_channels": [3, 16, 16],
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "stage_in_channels": [16, 16],
    "stage_mid_channels": [8, 8],
    "stage_out_channels": [16, 32],
    "stage_num_blocks": [1, 1],
    "stage_downsample": [False, True],
    "stage_light_block": [False, True],
    "stage_kernel_size": [3, 5],
    "stage_numb_of_layers": [2, 2],
}
_HIERA = {
    "image_size": [32, 32],
    "patch_size": [7, 7],
    "patch_stride": [4, 4],
    "patch_padding": [3, 3],
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 4, 8],
    "masked_unit_size": [8, 8],
}
_LEVIT = {
    "image_size": 64,
    "patch_size": 16,
    "hidden_sizes": [16, 32, 48],
    "num_attention_heads": [2, 4, 6],
    "depths": [1, 1, 1],
    "key_dim": [8, 8, 8],
}
_PYRAMID = {
    "image_size": 64,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 4, 8],
    "mlp_ratios": [2, 2, 2, 2],
}
_TEXT_NET = {
    "stem_out_channels": 16,
    "hidden_sizes": [16, 16, 32, 32, 48],
    "conv_layer_kernel_sizes": [[[3, 3]]] * 4,
    "conv_layer_strides": [[2]] * 4,
}
_MOBILE = {
    "image_size": 32,
    "patch_size": 2,
    "hidden_sizes": [16, 24, 32],
    "neck_hidden_sizes": [8, 16, 16, 24, 32, 40, 64],
}

OF_CLASSES: Types = {
    "bit": (
        "Bit",
        64,
        {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [2, 2], "num_groups": 4},
    ),
    "clip": ("CLIP", 32, {}),
    "convnext": ("ConvNext", 32, {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2}),
    "cvt": ("Cvt", 64, {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}),
    "data2vec-vision": ("Data2VecVision", 32, {}),
    "dinov2_with_registers": ("Dinov2WithRegisters", 32, {}),
    "donut-swin": ("DonutSwin", 32, _SWIN),
    "efficientnet": (
        "EfficientNet",
        64,
        {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    ),
    "focalnet": ("FocalNet", 32, _FOCAL),
    "hgnet_v2": ("HGNetV2", 64, _HGNET),
    "hiera": ("Hiera", 32, _HIERA),
    "ijepa": ("IJepa", 32, {}),
    "levit": ("Levit", 64, _LEVIT),
    "metaclip_2": ("MetaClip2", 32, {}),
    "mobilenet_v1": ("MobileNetV1", 64, {"depth_multiplier": 0.25, "min_depth": 8}),
    "mobilevit": ("MobileViT", 64, _MOBILE),
    "mobilevitv2": (
        "MobileViTV2",
        64,
        {"image_size": 64, "patch_size": 2, "width_multiplier": 0.25},
    ),
    "poolformer": ("PoolFormer", 64, {"hidden_sizes": [16, 32, 32, 48], "depths": [1, 1, 1, 1]}),
    "pvt": ("Pvt", 64, _PYRAMID),
    "pvt_v2": ("PvtV2", 64, _PYRAMID),
    "regnet": (
        "RegNet",
        64,
        {
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 32, 48],
            "depths": [1, 1, 2, 1],
            "groups_width": 8,
        },
    ),
    "segformer": ("Segformer", 32, {}),
    "siglip": ("Siglip", 32, {}),
    "swiftformer": (
        "SwiftFormer",
        64,
        {"embed_dims": [16, 32, 48, 64], "depths": [1, 1, 1, 1]},
    ),
    "textnet": ("TextNet", 64, _TEXT_NET),
    "vit_msn": ("ViTMSN", 32, {}),
}
HIDDEN: Types = {
    "vit": ("ViT", 16, {"encoder_stride": 8}),
    "deit": ("DeiT", 16, {"encoder_stride": 8}),
    "swin": ("Swin", 64, {**_SWIN, "encoder_stride": 8}),
    "swinv2": ("Swinv2", 64, {**_SWIN, "encoder_stride": 8}),
    "focalnet": ("FocalNet", 64, {**_FOCAL, "encoder_stride": 8}),
}
"""With the patches of an image of 32 by 32 in the place of its pixels."""


def _image(size: int) -> Batch:
    return lambda draws, config: {"pixel_values": draws.pixels(size), "labels": draws.classes()}


def _patches(draws: Draws, config: Any) -> dict[str, Any]:
    return {**patches(draws, config), "labels": draws.classes()}


def _masked(count: int) -> Batch:
    return lambda draws, config: {
        "pixel_values": draws.pixels(),
        "bool_masked_pos": draws.classes(count, count=2).bool(),
    }


def _tokens_of_pixels(draws: Draws, config: Any) -> dict[str, Any]:
    return {"input_ids": draws.tokens(), "labels": draws.classes()}


_PIXEL_GPT = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 101, "num_labels": CLASSES}

ENTRIES: Mapping[str, Entry] = {
    **{
        f"ImageClassification/{kind}": Entry(
            f"{name}ForImageClassification", _image(size), {**own, "num_labels": CLASSES}
        )
        for kind, (name, size, own) in OF_CLASSES.items()
    },
    "ImageClassification/siglip2": Entry(
        "Siglip2ForImageClassification",
        _patches,
        {"vision_config": {"num_patches": PATCHES}, "num_labels": CLASSES},
    ),
    "ImageClassification/imagegpt": Entry(
        "ImageGPTForImageClassification", _tokens_of_pixels, _PIXEL_GPT
    ),
    **{
        f"MaskedImageModeling/{kind}": Entry(f"{name}ForMaskedImageModeling", _masked(count), own)
        for kind, (name, count, own) in HIDDEN.items()
    },
}
