"""Time series: forecasts, classes, regression, masked patches; and decisions along a path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.census_tasks.draws import Draws
from benchmarks.census_tasks.entry import Batch, Entry

PAST, AHEAD, CHANNELS = 32, 8, 3
_PATCHES = {
    "num_input_channels": CHANNELS,
    "context_length": PAST,
    "patch_length": 8,
    "patch_stride": 8,
    "prediction_length": AHEAD,
}
_PATCH_TST = {**_PATCHES, "num_hidden_layers": 2, "d_model": 32}
_MIXER = {**_PATCHES, "num_layers": 2, "d_model": 16}
_SERIES = {
    "prediction_length": AHEAD,
    "context_length": 16,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "num_static_categorical_features": 1,
    "cardinality": [4],
    "embedding_dimension": [4],
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
}
_TIMES = {"patch_length": 8, "context_length": PAST, "horizon_length": 16, "num_hidden_layers": 2}
_PATH = {
    "state_dim": 5,
    "act_dim": 3,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 4,
    "max_ep_len": 32,
}


def _past(draws: Draws, config: Any) -> dict[str, Any]:
    return {"past_values": draws.normal(PAST, CHANNELS)}


def _future(draws: Draws, config: Any) -> dict[str, Any]:
    return {**_past(draws, config), "future_values": draws.normal(AHEAD, CHANNELS)}


def _target(count: int) -> Batch:
    def batch(draws: Draws, config: Any) -> dict[str, Any]:
        return {**_past(draws, config), "target_values": draws.normal(count)}

    return batch


def _class(draws: Draws, config: Any) -> dict[str, Any]:
    return {**_past(draws, config), "target_values": draws.classes(count=3)}


def _with_times(draws: Draws, config: Any) -> dict[str, Any]:
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": draws.normal(past),
        "past_time_features": draws.normal(past, 2),
        "past_observed_mask": draws.ones(past).float(),
        "static_categorical_features": draws.classes(1, count=4),
        "future_values": draws.normal(AHEAD),
        "future_time_features": draws.normal(AHEAD, 2),
        "future_observed_mask": draws.ones(AHEAD).float(),
    }


def _listed(draws: Draws, config: Any) -> dict[str, Any]:
    return {"past_values": draws.normal(PAST), "future_values": draws.normal(16)}


def _of_lists(model: Any, batch: Mapping[str, Any]) -> Any:
    series = list(batch["past_values"].unbind(0))
    return model(past_values=series, future_values=batch["future_values"]).loss


def _path(draws: Draws, config: Any) -> dict[str, Any]:
    return {
        "states": draws.normal(4, 5),
        "actions": draws.normal(4, 3),
        "rewards": draws.normal(4, 1),
        "returns_to_go": draws.normal(4, 1),
        "timesteps": draws.alike(range(4)),
        "attention_mask": draws.ones(4).float(),
    }


def _of_the_path(model: Any, batch: Mapping[str, Any]) -> Any:
    from torch.nn.functional import mse_loss

    given = model(**batch)
    states = mse_loss(given.state_preds, batch["states"])
    actions = mse_loss(given.action_preds, batch["actions"])
    return actions + states + given.return_preds.pow(2).mean()


def _nll(own: Mapping[str, Any]) -> dict[str, Any]:
    return {**own, "loss": "nll"}


_MIXED = {**_MIXER, "mode": "mix_channel", "self_attn": True}
_TO_CLASSES = {**_PATCH_TST, "num_targets": 3, "use_cls_token": True}

ENTRIES: Mapping[str, Entry] = {
    "TimeSeriesPrediction/patchtst": Entry("PatchTSTForPrediction", _future, _nll(_PATCH_TST)),
    "TimeSeriesPrediction/patchtst+layer_norm": Entry(
        "PatchTSTForPrediction", _future, {**_PATCH_TST, "norm_type": "layernorm"}
    ),
    "TimeSeriesClassification/patchtst": Entry("PatchTSTForClassification", _class, _TO_CLASSES),
    "TimeSeriesRegression/patchtst": Entry(
        "PatchTSTForRegression", _target(2), {**_PATCH_TST, "num_targets": 2}
    ),
    "TimeSeriesPreTraining/patchtst": Entry(
        "PatchTSTForPretraining", _past, {**_PATCH_TST, "do_mask_input": True}
    ),
    "TimeSeriesPrediction/patchtsmixer": Entry("PatchTSMixerForPrediction", _future, _nll(_MIXED)),
    "TimeSeriesClassification/patchtsmixer": Entry(
        "PatchTSMixerForTimeSeriesClassification", _class, _MIXER
    ),
    "TimeSeriesRegression/patchtsmixer": Entry(
        "PatchTSMixerForRegression", _target(CHANNELS), {**_MIXER, "norm_mlp": "BatchNorm"}
    ),
    "TimeSeriesPreTraining/patchtsmixer": Entry("PatchTSMixerForPretraining", _past, _MIXER),
    "TimeSeriesPrediction/time_series_transformer": Entry(
        "TimeSeriesTransformerForPrediction", _with_times, _SERIES
    ),
    "TimeSeriesPrediction/informer": Entry("InformerForPrediction", _with_times, _SERIES),
    "TimeSeriesPrediction/informer+full": Entry(
        "InformerForPrediction",
        _with_times,
        {**_SERIES, "attention_type": "full", "distil": False},
    ),
    "TimeSeriesPrediction/autoformer": Entry(
        "AutoformerForPrediction",
        _with_times,
        {**_SERIES, "moving_average": 5, "label_length": 4},
    ),
    "TimeSeriesPrediction/timesfm": Entry(
        "TimesFmModelForPrediction", _listed, _TIMES, loss=_of_lists
    ),
    "Decisions/decision_transformer": Entry(
        "DecisionTransformerModel", _path, _PATH, loss=_of_the_path
    ),
}
