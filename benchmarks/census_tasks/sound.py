"""Speech and sound: CTC, speakers, frames, speech to text, codecs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.census_configs import LENGTH
from benchmarks.census_tasks.draws import CLASSES, Draws
from benchmarks.census_tasks.entry import Batch, Entry, config_of

WAVES, FRAMES, SYMBOLS = 800, 40, 40
FRAMES_OF_WAVES = 79
_WAVES: Mapping[str, Any] = {
    "conv_dim": (32, 32),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16,
    "mask_time_prob": 0.0,
    "num_hidden_layers": 2,
    "vocab_size": SYMBOLS,
}
_GROUPED = {**_WAVES, "num_conv_pos_embedding_groups": 4}
_SPEAKERS = {
    "tdnn_dim": (32, 32, 32),
    "tdnn_kernel": (5, 3, 1),
    "tdnn_dilation": (1, 2, 1),
    "xvector_output_dim": 32,
}
_BY_TYPE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "data2vec-audio": (
        "Data2VecAudio",
        {**_WAVES, "conv_pos_kernel_size": 19, "num_conv_pos_embeddings": 2},
    ),
    "hubert": ("Hubert", _GROUPED),
    "sew": ("SEW", _GROUPED),
    "sew-d": ("SEWD", _GROUPED),
    "unispeech": ("UniSpeech", _GROUPED),
    "unispeech-sat": ("UniSpeechSat", _GROUPED),
    "wav2vec2": ("Wav2Vec2", _GROUPED),
    "wav2vec2-conformer": ("Wav2Vec2Conformer", {**_GROUPED, "max_source_positions": 200}),
    "wavlm": ("WavLM", {**_GROUPED, "num_buckets": 32, "max_bucket_distance": 80}),
    "wav2vec2-bert": (
        "Wav2Vec2Bert",
        {
            "feature_projection_input_dim": 16,
            "conv_depthwise_kernel_size": 5,
            "num_hidden_layers": 2,
            "mask_time_prob": 0.0,
            "vocab_size": SYMBOLS,
        },
    ),
}
_WITH_SPEAKERS = (
    "data2vec-audio",
    "unispeech-sat",
    "wav2vec2",
    "wav2vec2-bert",
    "wav2vec2-conformer",
    "wavlm",
)


def _heard(draws: Draws, config: Any) -> dict[str, Any]:
    if hasattr(config, "feature_projection_input_dim"):
        return {"input_features": draws.normal(FRAMES, config.feature_projection_input_dim)}
    return {"input_values": draws.normal(WAVES)}


def _spelled(draws: Draws, config: Any) -> dict[str, Any]:
    return {**_heard(draws, config), "labels": draws.tokens(6, top=SYMBOLS)}


def _spelled_under_mask(draws: Draws, config: Any) -> dict[str, Any]:
    return {**_spelled(draws, config), "attention_mask": draws.ones(WAVES)}


def _of_a_class(draws: Draws, config: Any) -> dict[str, Any]:
    return {**_heard(draws, config), "labels": draws.classes()}


def _frames(draws: Draws, config: Any) -> dict[str, Any]:
    heard = _heard(draws, config)
    count = FRAMES if "input_features" in heard else FRAMES_OF_WAVES
    return {**heard, "labels": draws.classes(count, CLASSES, count=2).float()}


def _spectrum(length: int, bins: int) -> Batch:
    return lambda draws, config: {
        "input_features": draws.normal(length, bins),
        "labels": draws.answers(LENGTH),
    }


def _waves(length: int) -> Batch:
    return lambda draws, config: {
        "input_values": draws.normal(length),
        "labels": draws.answers(LENGTH),
    }


def _mel(draws: Draws, config: Any) -> dict[str, Any]:
    inner = config.encoder_config
    return {
        "input_features": draws.normal(80, inner.num_mel_bins),
        "labels": draws.tokens(4),
        "attention_mask": draws.ones(80),
    }


def _of_whisper(draws: Draws, config: Any) -> dict[str, Any]:
    frames = draws.normal(config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": frames, "labels": draws.classes()}


def _heard_and_said() -> Any:
    import transformers

    encoder = config_of(transformers.Wav2Vec2Config, _GROUPED)
    decoder = config_of(transformers.BertConfig, {})
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def _tune(draws: Draws, config: Any) -> dict[str, Any]:
    return {"input_values": draws.normal(1, 320)}


def _as_it_was(model: Any, batch: Mapping[str, Any]) -> Any:
    return (model(**batch).audio_values - batch["input_values"]).pow(2).mean()


def _as_it_was_and_codes(model: Any, batch: Mapping[str, Any]) -> Any:
    given = model(**batch)
    return given.loss.mean() + (given.audio_values.pow(2)).mean()


def _by_type() -> dict[str, Entry]:
    made: dict[str, Entry] = {}
    for kind, (name, own) in _BY_TYPE.items():
        labelled = {**own, "num_labels": CLASSES}
        made[f"CTC/{kind}"] = Entry(f"{name}ForCTC", _spelled, own)
        if kind != "wav2vec2":  # `census_types` has it
            made[f"AudioClassification/{kind}"] = Entry(
                f"{name}ForSequenceClassification", _of_a_class, labelled
            )
        if kind in _WITH_SPEAKERS:
            frames = Entry(f"{name}ForAudioFrameClassification", _frames, labelled)
            made[f"AudioFrameClassification/{kind}"] = frames
            heads = {**labelled, **_SPEAKERS}
            made[f"XVector/{kind}"] = Entry(f"{name}ForXVector", _of_a_class, heads)
    return made


_SUBSAMPLED = {
    "encoder_config": {
        "subsampling_conv_channels": 8,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
    }
}
_CODEC = {
    "num_filters": 4,
    "hidden_size": 16,
    "codebook_dim": 16,
    "codebook_size": 32,
    "upsampling_ratios": [4, 2],
    "num_lstm_layers": 1,
}
_OF_RESIDUES = {
    "encoder_hidden_size": 8,
    "decoder_hidden_size": 32,
    "downsampling_ratios": [2, 4],
    "n_codebooks": 2,
    "codebook_size": 32,
    "codebook_dim": 4,
}
_MOONSHINE = {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2}

ENTRIES: Mapping[str, Entry] = {
    **_by_type(),
    "CTC/wav2vec2+mask": Entry("Wav2Vec2ForCTC", _spelled_under_mask, _GROUPED),
    "CTC/wav2vec2+masked_times": Entry(
        "Wav2Vec2ForCTC", _spelled_under_mask, {**_GROUPED, "mask_time_prob": 0.05}
    ),
    "CTC/parakeet_ctc": Entry("ParakeetForCTC", _mel, _SUBSAMPLED),
    "CTC/lasr_ctc": Entry("LasrForCTC", _mel, _SUBSAMPLED),
    "AudioClassification/whisper": Entry(
        "WhisperForAudioClassification", _of_whisper, {"num_labels": CLASSES}
    ),
    "SpeechSeq2Seq/speech_to_text": Entry(
        "Speech2TextForConditionalGeneration", _spectrum(64, 80), {"conv_channels": 32}
    ),
    "SpeechSeq2Seq/moonshine": Entry("MoonshineForConditionalGeneration", _waves(4000), _MOONSHINE),
    "SpeechSeq2Seq/pop2piano": Entry(
        "Pop2PianoForConditionalGeneration", _spectrum(LENGTH, 32), {"decoder_start_token_id": 0}
    ),
    "SpeechSeq2Seq/speech-encoder-decoder": Entry(
        "SpeechEncoderDecoderModel", _waves(WAVES), config=_heard_and_said
    ),
    "AudioCodec/encodec": Entry("EncodecModel", _tune, _CODEC, loss=_as_it_was),
    "AudioCodec/dac": Entry("DacModel", _tune, _OF_RESIDUES, loss=_as_it_was_and_codes),
}
