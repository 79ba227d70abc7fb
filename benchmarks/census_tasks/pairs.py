"""Two things that are to fit each other: texts, images, sounds, videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.census_tasks.draws import BATCH, Draws
from benchmarks.census_tasks.entry import Batch, Entry, config_of

PATCHES = 16
_CLAP = {
    "audio_config": {
        "spec_size": 64,
        "num_mel_bins": 16,
        "patch_embeds_hidden_size": 16,
        "depths": [2, 2],
        "num_attention_heads": [2, 2],
        "hidden_size": 32,
        "patch_size": 4,
        "window_size": 4,
        "enable_fusion": False,
    }
}
_GROUPED = {
    "vision_config": {
        "depths": [1, 1, 1],
        "num_group_tokens": [8, 4, 0],
        "num_output_groups": [8, 4, 4],
        "image_size": 32,
        "patch_size": 4,
    },
    "projection_intermediate_dim": 64,
}
_FRAMES = {
    "vision_config": {
        "num_frames": 4,
        "mit_hidden_size": 32,
        "mit_intermediate_size": 64,
        "mit_num_hidden_layers": 1,
        "mit_num_attention_heads": 4,
    },
    "prompt_num_attention_heads": 4,
    "prompt_layers": 1,
}
_BRIDGE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "share_link_tower_layers": False,
    "contrastive_hidden_size": 32,
    "logit_scale_init_value": 2.65,
    "text_config": {"hidden_size": 64, "num_hidden_layers": 2},
    "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 8},
}
_FLAVA = {
    "image_config": {},
    "text_config": {},
    "multimodal_config": {},
    "image_codebook_config": {"hidden_size": 8},
}


def asked(model: Any, batch: Mapping[str, Any]) -> Any:
    """The loss of a model that gives it on request."""
    return model(**batch, return_loss=True).loss


def _image(draws: Draws, config: Any) -> dict[str, Any]:
    return {"input_ids": draws.tokens(), "pixel_values": draws.pixels()}


def masked_image(draws: Draws, config: Any) -> dict[str, Any]:
    """A text with its mask, and an image."""
    given = _image(draws, config)
    return {**given, "attention_mask": draws.ones()}


def patches(draws: Draws, config: Any) -> dict[str, Any]:
    """An image as patches of four by four, each with its own mask."""
    return {
        "pixel_values": draws.normal(PATCHES, 3 * 64),
        "pixel_attention_mask": draws.ones(PATCHES),
        "spatial_shapes": draws.alike([4, 4]),
    }


def _text_and_patches(draws: Draws, config: Any) -> dict[str, Any]:
    return {"input_ids": draws.tokens(), **patches(draws, config)}


def _sound(draws: Draws, config: Any) -> dict[str, Any]:
    longer = draws.ones(1).bool().logical_not()
    sound = draws.normal(1, 64, 16)
    return {"input_ids": draws.tokens(), "input_features": sound, "is_longer": longer}


def _video(draws: Draws, config: Any) -> dict[str, Any]:
    """As many texts as videos, two of them several times."""
    texts = draws.tokens()[:2].repeat(BATCH // 2, 1)
    return {"input_ids": texts, "pixel_values": draws.normal(4, 3, 32, 32)}


def _everything(draws: Draws, config: Any) -> dict[str, Any]:
    return {
        "input_ids": draws.tokens(),
        "input_ids_masked": draws.tokens(),
        "pixel_values": draws.pixels(),
        "codebook_pixel_values": draws.pixels(),
        "mlm_labels": draws.answers(),
        "bool_masked_pos": draws.classes(16, count=2),
        "itm_labels": draws.classes(count=2),
    }


def _scores(draws: Draws, config: Any) -> dict[str, Any]:
    return {**masked_image(draws, config), "labels": draws.classes(count=2)}


def _match(model: Any, batch: Mapping[str, Any]) -> Any:
    return model(**batch).itm_score.logsumexp(-1).mean()


def _two_towers() -> Any:
    import transformers

    image = config_of(transformers.ViTConfig, {})
    text = config_of(transformers.BertConfig, {})
    made = transformers.VisionTextDualEncoderConfig
    return made.from_vision_text_configs(image, text, projection_dim=32)


def _contrastive(model: str, batch: Batch, own: Mapping[str, Any] | None = None) -> Entry:
    return Entry(model, batch, own or {}, loss=asked)


ENTRIES: Mapping[str, Entry] = {
    "Contrastive/altclip": _contrastive(
        "AltCLIPModel", _image, {"text_config": {"project_dim": 32}}
    ),
    "Contrastive/blip": _contrastive("BlipModel", _image),
    "Contrastive/bridgetower": _contrastive(
        "BridgeTowerForContrastiveLearning", masked_image, _BRIDGE
    ),
    "Contrastive/chinese_clip": _contrastive("ChineseCLIPModel", _image),
    "Contrastive/clap": _contrastive("ClapModel", _sound, _CLAP),
    "Contrastive/clipseg": _contrastive("CLIPSegModel", _image),
    "Contrastive/flava": _contrastive("FlavaForPreTraining", _everything, _FLAVA),
    "Contrastive/groupvit": _contrastive("GroupViTModel", _image, _GROUPED),
    "Contrastive/metaclip_2": _contrastive("MetaClip2Model", _image),
    "Contrastive/owlv2": _contrastive("Owlv2Model", masked_image),
    "Contrastive/owlvit": _contrastive("OwlViTModel", masked_image),
    "Contrastive/siglip": _contrastive("SiglipModel", _image),
    "Contrastive/siglip2": _contrastive(
        "Siglip2Model", _text_and_patches, {"vision_config": {"num_patches": PATCHES}}
    ),
    "Contrastive/vision-text-dual-encoder": Entry(
        "VisionTextDualEncoderModel", _image, config=_two_towers, loss=asked
    ),
    "Contrastive/xclip": _contrastive("XCLIPModel", _video, _FRAMES),
    "ImageTextMatching/blip": Entry("BlipForImageTextRetrieval", _image, loss=_match),
    "ImageTextMatching/bridgetower": Entry("BridgeTowerForImageAndTextRetrieval", _scores, _BRIDGE),
}
