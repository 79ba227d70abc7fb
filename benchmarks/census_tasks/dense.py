"""A value for every pixel: segmentation, depth, larger images, mattes, poses, masks of points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.census_tasks.draws import CLASSES, Draws
from benchmarks.census_tasks.entry import Batch, Entry, Loss, config_of

_FOUR = {"num_hidden_layers": 4, "num_labels": CLASSES}
_AUXILIARY = {**_FOUR, "auxiliary_channels": 16, "pool_scales": [1, 2]}
_DPT = {
    **_FOUR,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [16, 16, 32, 32],
    "fusion_hidden_size": 16,
}
_MOBILE = {
    "num_labels": CLASSES,
    "image_size": 64,
    "patch_size": 2,
    "hidden_sizes": [16, 24, 32],
    "neck_hidden_sizes": [8, 16, 16, 24, 32, 40, 64],
    "aspp_out_channels": 16,
}
_MOBILE_2 = {
    "num_labels": CLASSES,
    "image_size": 64,
    "patch_size": 2,
    "width_multiplier": 0.25,
    "aspp_out_channels": 16,
}
_GLPN = {
    "hidden_sizes": [8, 16, 16, 32],
    "num_attention_heads": [1, 2, 2, 4],
    "depths": [1, 1, 1, 1],
    "decoder_hidden_size": 16,
    "mlp_ratios": [2, 2, 2, 2],
}
_LARGER = {
    "image_size": 16,
    "patch_size": 1,
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [2, 2],
    "window_size": 4,
    "upscale": 2,
}
_POINTS = {
    "encoder_hidden_sizes": [8, 8, 16, 16],
    "decoder_hidden_size": 16,
    "descriptor_decoder_dim": 16,
}
_MASKED = {
    "hidden_size": 16,
    "mlp_dim": 32,
    "num_attention_heads": 2,
    "iou_head_hidden_dim": 16,
}
_SAM: Mapping[str, Any] = {
    "vision_config": {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "image_size": 32,
        "patch_size": 8,
        "window_size": 2,
        "global_attn_indexes": [1],
        "num_pos_feats": 8,
        "mlp_dim": 64,
        "num_attention_heads": 4,
    },
    "prompt_encoder_config": {
        "hidden_size": 16,
        "image_size": 32,
        "patch_size": 8,
        "mask_input_channels": 4,
    },
    "mask_decoder_config": _MASKED,
}
_STAGES = ["stage1", "stage2", "stage3", "stage4"]


def _segmented(size: int) -> Batch:
    return lambda draws, config: {
        "pixel_values": draws.pixels(size),
        "labels": draws.classes(size, size),
    }


def _depths(size: int, finer: int = 1) -> Batch:
    return lambda draws, config: {
        "pixel_values": draws.pixels(size),
        "labels": draws.even(finer * size, finer * size) + 0.5,
    }


def _off(name: str) -> Loss:
    """How far the result of that name is off the labels."""

    def loss(model: Any, batch: Mapping[str, Any]) -> Any:
        from torch.nn.functional import l1_loss

        return l1_loss(getattr(model(batch["pixel_values"]), name), batch["labels"])

    return loss


def _twice(draws: Draws, config: Any) -> dict[str, Any]:
    return {"pixel_values": draws.pixels(16), "labels": draws.even(3, 32, 32)}


def _matted(draws: Draws, config: Any) -> dict[str, Any]:
    return {"pixel_values": draws.normal(4, 32, 32), "labels": draws.even(1, 32, 32)}


def _posed(draws: Draws, config: Any) -> dict[str, Any]:
    return {"pixel_values": draws.normal(3, 64, 48), "labels": draws.even(5, 16, 12)}


def _described(draws: Draws, config: Any) -> dict[str, Any]:
    return {
        "input_ids": draws.tokens(),
        "pixel_values": draws.pixels(),
        "labels": draws.even(32, 32),
    }


def _pointed(draws: Draws, config: Any) -> dict[str, Any]:
    return {
        "pixel_values": draws.pixels(),
        "input_points": draws.even(1, 2, 2) * 30,
        "input_labels": draws.classes(1, 2, count=2),
        "labels": draws.even(16, 16),
    }


def _of_masks(model: Any, batch: Mapping[str, Any]) -> Any:
    from torch.nn.functional import binary_cross_entropy_with_logits

    given = {name: value for name, value in batch.items() if name != "labels"}
    masks = model(**given, multimask_output=False).pred_masks[:, 0, 0]
    return binary_cross_entropy_with_logits(masks, batch["labels"])


def _of_scores(model: Any, batch: Mapping[str, Any]) -> Any:
    return model(**batch).scores.mean()


def _uper() -> Any:
    import transformers

    sizes = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_stages": 4}
    backbone = config_of(transformers.ConvNextConfig, {**sizes, "out_features": _STAGES})
    return transformers.UperNetConfig(
        backbone_config=backbone,
        hidden_size=16,
        pool_scales=[1, 2],
        auxiliary_channels=16,
        auxiliary_in_channels=16,
        num_labels=CLASSES,
    )


def _any_depth() -> Any:
    import transformers

    own = {"image_size": 28, "patch_size": 7, "reshape_hidden_states": False}
    backbone = config_of(transformers.Dinov2Config, {**own, "out_features": _STAGES})
    return transformers.DepthAnythingConfig(
        backbone_config=backbone,
        patch_size=7,
        reassemble_hidden_size=32,
        neck_hidden_sizes=[8, 16, 16, 32],
        fusion_hidden_size=16,
        head_hidden_size=8,
    )


def _zoe_depth() -> Any:
    import transformers

    own = {"reshape_hidden_states": False, "use_relative_position_bias": True}
    backbone = config_of(transformers.BeitConfig, {**own, "out_features": _STAGES})
    return transformers.ZoeDepthConfig(
        backbone_config=backbone,
        backbone_hidden_size=32,
        neck_hidden_sizes=[8, 16, 16, 32],
        fusion_hidden_size=16,
        bottleneck_features=16,
        bin_embedding_dim=8,
        num_relative_features=8,
        num_attractors=[4, 2, 2, 1],
    )


def _matte() -> Any:
    import transformers

    backbone = transformers.VitDetConfig(
        num_channels=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=16,
        pretrain_image_size=32,
        out_features=["stage2"],
        window_block_indices=[0],
        window_size=2,
        use_relative_position_embeddings=True,
        residual_block_indices=[1],
    )
    return transformers.VitMatteConfig(
        backbone_config=backbone,
        hidden_size=32,
        convstream_hidden_sizes=[8, 16, 16],
        fusion_hidden_sizes=[32, 16, 8, 4],
    )


def _pose() -> Any:
    import transformers

    backbone = transformers.VitPoseBackboneConfig(
        image_size=[64, 48],
        patch_size=[16, 16],
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        out_features=["stage2"],
    )
    return transformers.VitPoseConfig(
        backbone_config=backbone, num_labels=5, use_simple_decoder=False
    )


def _of_classes(kind: str, model: str, size: int, own: Mapping[str, Any]) -> dict[str, Entry]:
    return {f"SemanticSegmentation/{kind}": Entry(model, _segmented(size), own)}


ENTRIES: Mapping[str, Entry] = {
    **_of_classes(
        "beit", "BeitForSemanticSegmentation", 32, {**_AUXILIARY, "out_indices": [1, 2, 3, 4]}
    ),
    **_of_classes(
        "data2vec-vision",
        "Data2VecVisionForSemanticSegmentation",
        32,
        {**_AUXILIARY, "out_indices": [1, 2, 3, 4]},
    ),
    **_of_classes("dpt", "DPTForSemanticSegmentation", 32, _DPT),
    **_of_classes(
        "mobilenet_v2",
        "MobileNetV2ForSemanticSegmentation",
        64,
        {"num_labels": CLASSES, "depth_multiplier": 0.25, "min_depth": 8},
    ),
    **_of_classes("mobilevit", "MobileViTForSemanticSegmentation", 64, _MOBILE),
    **_of_classes("mobilevitv2", "MobileViTV2ForSemanticSegmentation", 64, _MOBILE_2),
    "SemanticSegmentation/upernet": Entry(
        "UperNetForSemanticSegmentation", _segmented(64), config=_uper
    ),
    "ImageSegmentation/clipseg": Entry(
        "CLIPSegForImageSegmentation",
        _described,
        {
            "extract_layers": [0, 1, 2],
            "reduce_dim": 16,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 32,
        },
    ),
    "DepthEstimation/dpt": Entry(
        "DPTForDepthEstimation", _depths(32, 2), _DPT, loss=_off("predicted_depth")
    ),
    "DepthEstimation/depth_anything": Entry(
        "DepthAnythingForDepthEstimation",
        _depths(28),
        config=_any_depth,
        loss=_off("predicted_depth"),
    ),
    "DepthEstimation/glpn": Entry("GLPNForDepthEstimation", _depths(64), _GLPN),
    "DepthEstimation/zoedepth": Entry(
        "ZoeDepthForDepthEstimation",
        _depths(32, 2),
        config=_zoe_depth,
        loss=_off("predicted_depth"),
    ),
    "ImageToImage/swin2sr": Entry(
        "Swin2SRForImageSuperResolution", _twice, _LARGER, loss=_off("reconstruction")
    ),
    "ImageMatting/vitmatte": Entry(
        "VitMatteForImageMatting", _matted, config=_matte, loss=_off("alphas")
    ),
    "PoseEstimation/vitpose": Entry(
        "VitPoseForPoseEstimation", _posed, config=_pose, loss=_off("heatmaps")
    ),
    "KeypointDetection/superpoint": Entry(
        "SuperPointForKeypointDetection",
        lambda draws, config: {"pixel_values": draws.pixels()},
        _POINTS,
        loss=_of_scores,
    ),
    "MaskGeneration/sam": Entry("SamModel", _pointed, _SAM, loss=_of_masks),
    "MaskGeneration/sam_hq": Entry(
        "SamHQModel",
        _pointed,
        {**_SAM, "mask_decoder_config": {**_MASKED, "vit_dim": 32}},
        loss=_of_masks,
    ),
}
