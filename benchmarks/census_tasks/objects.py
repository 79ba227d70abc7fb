"""Objects of an image: detection, and masks of single ones.

Where the library matches queries with objects on the host, ``+matched`` entries have its own loss;
the others take queries in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.census_configs import LENGTH
from benchmarks.census_tasks.draws import CLASSES, Draws
from benchmarks.census_tasks.entry import Batch, Entry, config_of

OBJECTS, QUERIES = 3, 6
_DETR = {
    "backbone": None,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_queries": QUERIES,
    "num_labels": CLASSES,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
_RT_DETR = {
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [16, 16, 32],
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "d_model": 32,
    "num_queries": QUERIES,
    "decoder_in_channels": [32, 32, 32],
    "decoder_ffn_dim": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "num_denoising": 0,
    "num_labels": CLASSES,
    "decoder_n_points": 2,
}
_YOLOS = {"image_size": [32, 32], "num_detection_tokens": QUERIES, "num_labels": CLASSES}
_EOMT = {
    "image_size": 32,
    "patch_size": 8,
    "num_queries": QUERIES,
    "num_labels": CLASSES,
    "num_hidden_layers": 3,
    "num_blocks": 1,
    "num_upscale_blocks": 1,
    "mlp_ratio": 2,
}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}


def _objects(size: int) -> Batch:
    return lambda draws, config: {
        "pixel_values": draws.pixels(size),
        "class_labels": draws.classes(OBJECTS),
        "boxes": draws.even(OBJECTS, 4) * 0.4 + 0.1,
    }


def _masks(draws: Draws, config: Any) -> dict[str, Any]:
    return {
        "pixel_values": draws.pixels(),
        "class_labels": draws.classes(OBJECTS),
        "mask_labels": draws.classes(OBJECTS, 32, 32, count=2).float(),
    }


def _pixels(draws: Draws, config: Any) -> dict[str, Any]:
    return {"pixel_values": draws.pixels()}


def _wanted(draws: Draws, config: Any) -> dict[str, Any]:
    return {
        "input_ids": draws.tokens(),
        "attention_mask": draws.ones(),
        "pixel_values": draws.pixels(),
        "boxes": draws.even(LENGTH, 4),
    }


def _in_order(model: Any, batch: Mapping[str, Any]) -> Any:
    from torch.nn.functional import cross_entropy, l1_loss

    given = model(pixel_values=batch["pixel_values"])
    logits = given.logits[:, :OBJECTS].flatten(0, 1)
    boxes = l1_loss(given.pred_boxes[:, :OBJECTS], batch["boxes"])
    return cross_entropy(logits, batch["class_labels"].flatten()) + boxes


def _matched(model: Any, batch: Mapping[str, Any]) -> Any:
    pairs = zip(batch["class_labels"], batch["boxes"], strict=True)
    labels = [{"class_labels": kinds, "boxes": boxes} for kinds, boxes in pairs]
    return model(pixel_values=batch["pixel_values"], labels=labels).loss


def _matched_masks(model: Any, batch: Mapping[str, Any]) -> Any:
    masks, kinds = (list(batch[name]) for name in ("mask_labels", "class_labels"))
    return model(batch["pixel_values"], mask_labels=masks, class_labels=kinds).loss


def _of_masks(model: Any, batch: Mapping[str, Any]) -> Any:
    given = model(**batch)
    classes = given.class_queries_logits.logsumexp(-1).mean()
    return given.masks_queries_logits.pow(2).mean() + classes


def _of_texts(model: Any, batch: Mapping[str, Any]) -> Any:
    from torch.nn.functional import l1_loss

    given = model(**{name: value for name, value in batch.items() if name != "boxes"})
    return l1_loss(given.pred_boxes, batch["boxes"]) + given.logits.sigmoid().mean()


def _detr(name: str, stages: tuple[str, ...] = ("stage4",), **own: Any) -> Any:
    import transformers

    backbone = config_of(transformers.ResNetConfig, {**_RESNET, "out_features": list(stages)})
    made = getattr(transformers, name)
    sizes = {"d_model": 32} if "hidden_size" not in own else {}
    return made(**{**_DETR, **sizes, **own, "backbone_config": backbone})


def _deformable() -> Any:
    own = {"num_feature_levels": 2, "encoder_n_points": 2, "decoder_n_points": 2}
    return _detr("DeformableDetrConfig", ("stage3", "stage4"), **own)


def _rt_detr(name: str) -> Any:
    import transformers

    stages = ["stage2", "stage3", "stage4"]
    backbone = transformers.RTDetrResNetConfig(**_RESNET, out_features=stages)
    return getattr(transformers, name)(**_RT_DETR, backbone_config=backbone)


def _small_swin() -> Any:
    import transformers

    return transformers.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


def _maskformer() -> Any:
    import transformers

    decoder = transformers.DetrConfig(**{**_DETR, "d_model": 32, "encoder_layers": 1})
    return transformers.MaskFormerConfig(
        backbone_config=_small_swin(),
        decoder_config=decoder,
        fpn_feature_size=32,
        mask_feature_size=32,
        num_labels=CLASSES,
    )


def _mask2former() -> Any:
    import transformers

    return transformers.Mask2FormerConfig(
        backbone_config=_small_swin(),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=32,
        num_queries=QUERIES,
        num_labels=CLASSES,
    )


def _both(kind: str, model: str, size: int, **entry: Any) -> dict[str, Entry]:
    """Queries in their order, and those that the library matches."""
    return {
        f"ObjectDetection/{kind}": Entry(model, _objects(size), **entry, loss=_in_order),
        f"ObjectDetection/{kind}+matched": Entry(model, _objects(size), **entry, loss=_matched),
    }


def _segmented(kind: str, model: str, config: Any) -> dict[str, Entry]:
    task = "UniversalSegmentation"
    return {
        f"{task}/{kind}": Entry(model, _pixels, config=config, loss=_of_masks),
        f"{task}/{kind}+matched": Entry(model, _masks, config=config, loss=_matched_masks),
    }


def _plain(kind: str, model: str, config: Any) -> dict[str, Entry]:
    entry = Entry(model, _objects(64), config=config, loss=_in_order)
    return {f"ObjectDetection/{kind}": entry}


ENTRIES: Mapping[str, Entry] = {
    **_both("yolos", "YolosForObjectDetection", 32, own=_YOLOS),
    **_both("detr", "DetrForObjectDetection", 64, config=lambda: _detr("DetrConfig")),
    **_both("deformable_detr", "DeformableDetrForObjectDetection", 64, config=_deformable),
    **_both("rt_detr", "RTDetrForObjectDetection", 64, config=lambda: _rt_detr("RTDetrConfig")),
    **_plain(
        "conditional_detr",
        "ConditionalDetrForObjectDetection",
        lambda: _detr("ConditionalDetrConfig"),
    ),
    **_plain(
        "table-transformer",
        "TableTransformerForObjectDetection",
        lambda: _detr("TableTransformerConfig"),
    ),
    **_plain(
        "dab-detr", "DabDetrForObjectDetection", lambda: _detr("DabDetrConfig", hidden_size=32)
    ),
    **_plain("rt_detr_v2", "RTDetrV2ForObjectDetection", lambda: _rt_detr("RTDetrV2Config")),
    "ObjectDetection/owlvit": Entry("OwlViTForObjectDetection", _wanted, loss=_of_texts),
    **_segmented("maskformer", "MaskFormerForInstanceSegmentation", _maskformer),
    **_segmented("mask2former", "Mask2FormerForUniversalSegmentation", _mask2former),
    "UniversalSegmentation/eomt": Entry(
        "EomtForUniversalSegmentation", _pixels, _EOMT, loss=_of_masks
    ),
}
