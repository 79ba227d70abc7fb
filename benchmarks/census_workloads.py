"""Workloads of the census: a model type with a tiny config and a batch by its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import autopar
from benchmarks.census_configs import FIRST_SPECIAL, LENGTH, tiny
from benchmarks.census_tasks.every import ENTRIES
from benchmarks.census_types import IMAGE_TOKENS, OTHERS, OWN, TYPED

BATCH = 8
CAUSAL = "CausalLM"
_MAPPINGS = {
    "Contrastive": "MODEL_MAPPING_NAMES",
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "SpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "TokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "SequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "QuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "ImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MaskedImageModeling": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "SemanticSegmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "ImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AudioClassification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}


def causal_types() -> tuple[str, ...]:
    """Every type that `AutoModelForCausalLM` knows, in the library's order."""
    return tuple(_mapping(CAUSAL))


def task_of(name: str) -> tuple[str, str]:
    """``"bert"`` is a causal type, ``"MaskedLM/bert"`` one of the others: (task, type)."""
    task, slash, model = name.partition("/")
    return (task, model) if slash else (CAUSAL, name)


def other_types() -> tuple[str, ...]:
    """The others, each with its task before it."""
    named = (f"{task}/{model}" for task, models in OTHERS.items() for model in models)
    return (*named, *ENTRIES)


def workload_of(name: str) -> autopar.Workload:
    """The workload of a type, named as in `task_of`; raises where the library cannot build it."""
    if name in ENTRIES:
        return ENTRIES[name].workload()
    task, model = task_of(name)
    config, made = _config(task, model)

    def build() -> Any:
        return _returning_loss(made(config)) if task == "Contrastive" else made(config)

    return autopar.Workload(
        model=build, batch=_batch(task, config, model), optimizer="adamw", clip_norm=1.0
    )


def _returning_loss(model: Any) -> Any:
    """A model that is asked for its loss in the call, not by labels."""
    from torch import nn

    class Asked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: Any) -> Any:
            return self.model(**batch, return_loss=True).loss

    return Asked()


def _mapping(task: str) -> Mapping[str, str]:
    from transformers.models.auto import modeling_auto

    mapping: Mapping[str, str] = getattr(modeling_auto, _MAPPINGS[task])
    return mapping


def _config(task: str, model: str) -> tuple[Any, Any]:
    """The tiny config and the class of the model; the nested config of text where it takes that."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = getattr(transformers, CONFIG_MAPPING_NAMES[model])
    made = getattr(transformers, _first(_mapping(task)[model]))
    own: Mapping[str, Any] = OWN.get(model, {})
    takes = getattr(made, "config_class", config)
    for name, inner in config.sub_configs.items():
        if takes is inner and takes is not config:
            config, own = inner, own.get(name, {})
    return tiny(config, own), made


def _first(name: str | tuple[str, ...]) -> str:
    return name if isinstance(name, str) else name[0]


def _batch(task: str, config: Any, model: str) -> Callable[[], Mapping[str, Any]]:
    def batch() -> Mapping[str, Any]:
        import torch

        generator = torch.Generator().manual_seed(0)

        def draw(top: int, *shape: int) -> Any:
            return torch.randint(3, top, (BATCH, *shape), generator=generator)

        def normal(*shape: int) -> Any:
            return torch.randn(BATCH, *shape, generator=generator)

        def labels(*shape: int) -> Any:
            drawn = draw(FIRST_SPECIAL, *shape)
            drawn[:, :2] = -100
            drawn[0, :9] = -100  # unequal counts over the ranks
            return drawn

        classes = getattr(config, "num_labels", 2) + 2  # draws begin at 3
        size = getattr(config, "image_size", 32)
        size = max(size) if isinstance(size, list | tuple) else size
        tokens = draw(FIRST_SPECIAL, LENGTH)
        if task in ("MaskedLM", "Seq2SeqLM", CAUSAL):
            return {"input_ids": tokens, "labels": labels(LENGTH)}
        if task == "TokenClassification":
            return {"input_ids": tokens, "labels": draw(classes, LENGTH) - 3}
        if task == "SequenceClassification":
            return {"input_ids": tokens, "labels": draw(classes) - 3}
        if task == "QuestionAnswering":
            places = {name: draw(LENGTH) for name in ("start_positions", "end_positions")}
            return {"input_ids": tokens, **places}
        if task == "ImageClassification":
            return {"pixel_values": normal(3, size, size), "labels": draw(classes) - 3}
        if task == "SemanticSegmentation":
            pixels = normal(3, 2 * size, 2 * size)
            return {"pixel_values": pixels, "labels": draw(classes, 2 * size, 2 * size) - 3}
        if task == "MaskedImageModeling":
            return {"pixel_values": normal(3, size, size)}
        if task == "Contrastive":
            return {"input_ids": tokens, "pixel_values": normal(3, 32, 32)}
        if task == "ImageTextToText":
            count = IMAGE_TOKENS[model]
            tokens = draw(FIRST_SPECIAL, LENGTH + count)
            tokens[:, 2 : 2 + count] = config.image_token_id
            types = {"token_type_ids": (tokens == config.image_token_id).long()}
            pixels, answers = normal(3, size, size), labels(LENGTH + count)
            given = {"input_ids": tokens, "pixel_values": pixels, "labels": answers}
            return given | (types if model in TYPED else {})
        if task == "AudioClassification" and hasattr(config, "num_mel_bins"):
            frames = normal(config.max_length, config.num_mel_bins)
            return {"input_values": frames, "labels": draw(classes) - 3}
        if task == "AudioClassification":
            return {"input_values": normal(800), "labels": draw(classes) - 3}
        if task == "SpeechSeq2Seq":
            frames = normal(config.num_mel_bins, 2 * config.max_source_positions)
            return {"input_features": frames, "labels": labels(LENGTH)}
        raise ValueError(f"the census has no batch for the task {task}")

    return batch
