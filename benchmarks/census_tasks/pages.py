"""Questions on images, pages and tables, and videos of a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.census_configs import LENGTH
from benchmarks.census_tasks.draws import CLASSES, Draws
from benchmarks.census_tasks.entry import Entry

FRAMES = 4
_PAGE = {
    "input_size": 32,
    "patch_size": 16,
    "coordinate_size": 4,
    "shape_size": 8,
    "max_2d_position_embeddings": 64,
    "num_hidden_layers": 2,
}
_VIDEO = {"num_frames": FRAMES, "num_labels": CLASSES}
_AHEAD = {
    "crop_size": 32,
    "patch_size": 8,
    "frames_per_clip": FRAMES,
    "num_labels": CLASSES,
    "num_pooler_layers": 1,
    "pred_hidden_size": 32,
    "pred_num_attention_heads": 4,
    "pred_num_hidden_layers": 1,
}
_TABLE = {
    "type_vocab_sizes": [3, 8, 8, 2, 8, 8, 10],
    "max_num_rows": 8,
    "max_num_columns": 8,
}
_REGIONS = {
    "visual_feat_dim": 16,
    "num_qa_labels": CLASSES,
    "l_layers": 2,
    "x_layers": 1,
    "r_layers": 1,
}


def _answered(draws: Draws) -> dict[str, Any]:
    return {name: draws.whole(LENGTH, low=3) for name in ("start_positions", "end_positions")}


def _page(draws: Draws, config: Any) -> dict[str, Any]:
    return {
        "input_ids": draws.tokens(),
        "bbox": draws.boxes(),
        "pixel_values": draws.pixels(),
        **_answered(draws),
    }


def _boxed(draws: Draws, config: Any) -> dict[str, Any]:
    return {"input_ids": draws.tokens(), "bbox": draws.boxes(), **_answered(draws)}


def _drawn_page(draws: Draws, config: Any) -> dict[str, Any]:
    return {
        "input_ids": draws.tokens(),
        "bbox": draws.even(LENGTH, 4),
        "pixel_values": draws.pixels(),
        "labels": draws.answers(),
    }


def _question(draws: Draws, config: Any) -> dict[str, Any]:
    scores = draws.even(CLASSES)
    return {"input_ids": draws.tokens(), "pixel_values": draws.pixels(), "labels": scores}


def _regions(draws: Draws, config: Any) -> dict[str, Any]:
    return {
        "input_ids": draws.tokens(),
        "visual_feats": draws.normal(4, 16),
        "visual_pos": draws.even(4, 4),
        "labels": draws.classes(),
    }


def _features(draws: Draws, config: Any) -> dict[str, Any]:
    return {
        "input_ids": draws.tokens(),
        "attention_mask": draws.ones(),
        "visual_embeds": draws.normal(4, 32),
        "labels": draws.even(CLASSES).softmax(-1),
    }


def _cells(draws: Draws, config: Any) -> dict[str, Any]:
    return {
        "input_ids": draws.tokens(),
        "token_type_ids": draws.classes(LENGTH, 7, count=2),
        "attention_mask": draws.ones(),
        "labels": draws.classes(LENGTH, count=2),
    }


def _video(draws: Draws, config: Any) -> dict[str, Any]:
    return {"pixel_values": draws.normal(FRAMES, 3, 32, 32), "labels": draws.classes()}


def _clip(draws: Draws, config: Any) -> dict[str, Any]:
    return {"pixel_values_videos": draws.normal(FRAMES, 3, 32, 32), "labels": draws.classes()}


def _hidden(draws: Draws, config: Any) -> dict[str, Any]:
    """A video of which three quarters of the patches are hidden."""
    import torch

    masked = draws.alike(torch.arange(32) % 4 != 0)
    return {"pixel_values": draws.normal(FRAMES, 3, 32, 32), "bool_masked_pos": masked}


ENTRIES: Mapping[str, Entry] = {
    "DocumentQuestionAnswering/layoutlm": Entry("LayoutLMForQuestionAnswering", _boxed),
    "DocumentQuestionAnswering/layoutlmv3": Entry("LayoutLMv3ForQuestionAnswering", _page, _PAGE),
    "DocumentQuestionAnswering/udop": Entry(
        "UdopForConditionalGeneration",
        _drawn_page,
        {"decoder_start_token_id": 0, "max_2d_position_embeddings": 64, "num_layers": 2},
    ),
    "VisualQuestionAnswering/lxmert": Entry("LxmertForQuestionAnswering", _regions, _REGIONS),
    "VisualQuestionAnswering/vilt": Entry(
        "ViltForQuestionAnswering", _question, {"num_labels": CLASSES}
    ),
    "VisualQuestionAnswering/visual_bert": Entry(
        "VisualBertForQuestionAnswering",
        _features,
        {"visual_embedding_dim": 32, "num_labels": CLASSES},
    ),
    "TableQuestionAnswering/tapas": Entry("TapasForQuestionAnswering", _cells, _TABLE),
    "VideoClassification/timesformer": Entry("TimesformerForVideoClassification", _video, _VIDEO),
    "VideoClassification/videomae": Entry("VideoMAEForVideoClassification", _video, _VIDEO),
    "VideoClassification/vivit": Entry(
        "VivitForVideoClassification", _video, {**_VIDEO, "tubelet_size": [2, 8, 8]}
    ),
    "VideoClassification/vjepa2": Entry("VJEPA2ForVideoClassification", _clip, _AHEAD),
    "VideoPreTraining/videomae": Entry(
        "VideoMAEForPreTraining", _hidden, {"num_frames": FRAMES, "decoder_num_hidden_layers": 2}
    ),
}
