"""Texts: masked words, translation, classes, answers, choices, sentences that follow each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.census_configs import LENGTH
from benchmarks.census_tasks.draws import CLASSES, Draws
from benchmarks.census_tasks.entry import Batch, Entry, config_of

Types = Mapping[str, tuple[str, Mapping[str, Any]]]
"""By model type: what its classes' names begin with, and settings."""
_WHOLE = {"attention_type": "original_full"}
_HASHED = {
    "num_hash_buckets": 64,
    "local_transformer_stride": 8,
    "downsampling_rate": 4,
    "num_hash_functions": 4,
}
_XLNET = {"n_layer": 2, "n_head": 4, "d_model": 32}
_FROM_PAD = {"decoder_start_token_id": 0}
_LOCAL = {"attention_window": 8}
_LATENTS = {
    "num_latents": 8,
    "d_latents": 32,
    "d_model": 32,
    "num_self_attends_per_block": 2,
    "num_self_attention_heads": 4,
    "num_cross_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}
_AXIAL = {
    "is_decoder": False,
    "axial_pos_shape": (4, 4),
    "axial_pos_embds_dim": (16, 16),
    "attn_layers": ("local",),
}
_CHINESE = {
    "pronunciation_vocab_size": 50,
    "shape_vocab_size": 50,
    "pronunciation_embed_dim": 8,
    "shape_embed_dim": 8,
}
_SWITCH = {
    **_FROM_PAD,
    "num_experts": 4,
    "num_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_decoder_layers": 2,
}
_BROS = {"dim_bbox_sinusoid_emb_2d": 32, "dim_bbox_sinusoid_emb_1d": 4, "dim_bbox_projection": 8}
_PAGE = {
    "input_size": 32,
    "patch_size": 16,
    "coordinate_size": 4,
    "shape_size": 8,
    "max_2d_position_embeddings": 64,
}

MASKED: Types = {
    "big_bird": ("BigBird", _WHOLE),
    "convbert": ("ConvBert", {}),
    "data2vec-text": ("Data2VecText", {}),
    "ernie": ("Ernie", {}),
    "esm": ("Esm", {"mask_token_id": 5, "token_dropout": False, "vocab_size": 101}),
    "eurobert": ("EuroBert", {}),
    "gte": ("Gte", {}),
    "ibert": ("IBert", {}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", {}),
    "longformer": ("Longformer", _LOCAL),
    "luke": ("Luke", {}),
    "megatron-bert": ("MegatronBert", {}),
    "mra": ("Mra", {}),
    "nomic_bert": ("NomicBert", {}),
    "nystromformer": ("Nystromformer", {"num_landmarks": 8, "segment_means_seq_len": LENGTH}),
    "rembert": ("RemBert", {"output_embedding_size": 32}),
    "reformer": ("Reformer", _AXIAL),
    "roberta-prelayernorm": ("RobertaPreLayerNorm", {}),
    "roc_bert": ("RoCBert", _CHINESE),
    "roformer": ("RoFormer", {}),
    "xlm-roberta-xl": ("XLMRobertaXL", {}),
    "xmod": ("Xmod", {}),
    "yoso": ("Yoso", {}),
}
TRANSLATED: Types = {
    "bigbird_pegasus": ("BigBirdPegasus", _WHOLE),
    "blenderbot": ("Blenderbot", {}),
    "blenderbot-small": ("BlenderbotSmall", {}),
    "fsmt": ("FSMT", {"langs": ["en", "de"], "src_vocab_size": 101, "tgt_vocab_size": 101}),
    "led": ("LED", _LOCAL),
    "longt5": ("LongT5", _FROM_PAD),
    "mbart": ("MBart", {}),
    "mvp": ("Mvp", {}),
    "nllb-moe": ("NllbMoe", {}),
    "pegasus_x": ("PegasusX", {}),
    "plbart": ("PLBart", {}),
    "switch_transformers": ("SwitchTransformers", _SWITCH),
    "t5gemma": ("T5Gemma", {}),
    "umt5": ("UMT5", _FROM_PAD),
}
OF_CLASSES: Types = {
    "canine": ("Canine", _HASHED),
    "lilt": ("Lilt", {"hidden_size": 48, "max_2d_position_embeddings": 64}),
    "markuplm": ("MarkupLM", {"max_depth": 4, "xpath_unit_hidden_size": 8}),
    "llama": ("Llama", {"pad_token_id": 0}),
    "gpt2": ("GPT2", {"pad_token_id": 0}),
    "t5": ("T5", {}),
    "bart": ("Bart", {}),
    "mbart": ("MBart", {}),
    "deberta-v2": ("DebertaV2", {}),
    "modernbert": ("ModernBert", {}),
    "mpt": ("Mpt", {}),
    "openai-gpt": ("OpenAIGPT", {}),
    "ctrl": ("CTRL", {}),
    "zamba2": ("Zamba2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma3_text": ("Gemma3Text", {}),
}
TAGGED: Types = {
    "bert": ("Bert", {}),
    "deberta": ("Deberta", {}),
    "distilbert": ("DistilBert", {}),
    "xlnet": ("XLNet", _XLNET),
    "mpnet": ("MPNet", {}),
    "bros": ("Bros", _BROS),
    "layoutlmv3": ("LayoutLMv3", _PAGE),
    "canine": ("Canine", _HASHED),
    "t5": ("T5", {}),
    "gpt2": ("GPT2", {}),
    "llama": ("Llama", {}),
}
ANSWERED: Types = {
    "bart": ("Bart", {}),
    "splinter": ("Splinter", {"question_token_id": 5}),
    "led": ("LED", _LOCAL),
    "longformer": ("Longformer", _LOCAL),
    "luke": ("Luke", {}),
    "t5": ("T5", {}),
    "gptj": ("GPTJ", {}),
    "opt": ("OPT", {}),
    "llama": ("Llama", {}),
    "big_bird": ("BigBird", _WHOLE),
    "mobilebert": ("MobileBert", {}),
}
CHOSEN: Types = {
    "bert": ("Bert", {}),
    "deberta-v2": ("DebertaV2", {}),
    "xlnet": ("XLNet", _XLNET),
    "luke": ("Luke", {}),
    "roformer": ("RoFormer", {}),
    "squeezebert": ("SqueezeBert", {}),
    "canine": ("Canine", _HASHED),
    "funnel": ("Funnel", {}),
}
FOLLOWING: Types = {
    "bert": ("Bert", {}),
    "fnet": ("FNet", {}),
    "megatron-bert": ("MegatronBert", {}),
    "mobilebert": ("MobileBert", {}),
}


def _words(draws: Draws, config: Any) -> dict[str, Any]:
    return {"input_ids": draws.tokens(), "labels": draws.answers()}


def _class(draws: Draws, config: Any) -> dict[str, Any]:
    given = {"input_ids": draws.tokens(), "labels": draws.classes()}
    if config.is_encoder_decoder:
        given["input_ids"][:, -1] = config.eos_token_id
    if config.model_type == "lilt":
        given["bbox"] = draws.boxes()
    return given


def _tags(draws: Draws, config: Any) -> dict[str, Any]:
    given = {"input_ids": draws.tokens(), "labels": draws.classes(LENGTH)}
    if config.model_type == "bros":
        given["bbox"] = draws.even(LENGTH, 4)
    if config.model_type == "layoutlmv3":
        given |= {"bbox": draws.boxes(), "pixel_values": draws.pixels()}
    return given


def _answer(draws: Draws, config: Any) -> dict[str, Any]:
    tokens = draws.tokens()
    if config.model_type in ("longformer", "big_bird"):
        tokens[:, (5, 6, 15)] = config.sep_token_id
    if config.model_type == "splinter":
        tokens[:, 3] = config.question_token_id
    places = {name: draws.whole(LENGTH, low=3) for name in ("start_positions", "end_positions")}
    return {"input_ids": tokens, **places}


def _choice(draws: Draws, config: Any) -> dict[str, Any]:
    return {"input_ids": draws.tokens(3, LENGTH), "labels": draws.classes(count=3)}


def _two(draws: Draws, config: Any) -> dict[str, Any]:
    return {"input_ids": draws.tokens(), "labels": draws.classes(count=2)}


def _words_and(name: str) -> Batch:
    return lambda draws, config: {**_words(draws, config), name: draws.classes(count=2)}


def _replaced(draws: Draws, config: Any) -> dict[str, Any]:
    given = {"input_ids": draws.tokens(), "labels": draws.classes(LENGTH, count=2)}
    return {**given, "attention_mask": draws.ones()}


def _with_regions(draws: Draws, config: Any) -> dict[str, Any]:
    return {
        "input_ids": draws.tokens(),
        "attention_mask": draws.ones(),
        "visual_embeds": draws.normal(4, 32),
        "visual_attention_mask": draws.ones(4),
        "labels": draws.answers(LENGTH + 4),
        "sentence_image_labels": draws.classes(count=2),
    }


def _latent_words(draws: Draws, config: Any) -> dict[str, Any]:
    return {"inputs": draws.tokens(), "labels": draws.answers()}


def _two_berts() -> Any:
    import transformers

    bert = transformers.BertConfig
    made = transformers.EncoderDecoderConfig
    config = made.from_encoder_decoder_configs(config_of(bert, {}), config_of(bert, {}))
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def _all(
    task: str, types: Types, batch: Batch, own: Mapping[str, Any], ending: str = ""
) -> dict[str, Entry]:
    """An entry for every type; names of classes end as the task does, or as ``ending`` says."""
    return {
        f"{task}/{kind}": Entry(f"{name}{ending or f'For{task}'}", batch, {**settings, **own})
        for kind, (name, settings) in types.items()
    }


_COUNTED = {"num_labels": CLASSES}
_SPARSE = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}

ENTRIES: Mapping[str, Entry] = {
    **_all("MaskedLM", MASKED, _words, {}),
    "MaskedLM/big_bird+sparse": Entry(
        "BigBirdForMaskedLM",
        lambda draws, config: {"input_ids": draws.tokens(64), "labels": draws.answers(64)},
        _SPARSE,
    ),
    "MaskedLM/perceiver": Entry("PerceiverForMaskedLM", _latent_words, _LATENTS),
    "MaskedLM/flaubert": Entry("FlaubertWithLMHeadModel", _words),
    "MaskedLM/xlm": Entry(
        "XLMWithLMHeadModel", _words, {"n_layers": 2, "n_heads": 4, "emb_dim": 32}
    ),
    **_all("Seq2SeqLM", TRANSLATED, _words, {}, "ForConditionalGeneration"),
    "Seq2SeqLM/marian": Entry("MarianMTModel", _words, _FROM_PAD),
    "Seq2SeqLM/encoder-decoder": Entry("EncoderDecoderModel", _words, config=_two_berts),
    **_all("SequenceClassification", OF_CLASSES, _class, _COUNTED),
    **_all("TokenClassification", TAGGED, _tags, _COUNTED),
    **_all("QuestionAnswering", ANSWERED, _answer, {}),
    "QuestionAnswering/xlnet": Entry("XLNetForQuestionAnsweringSimple", _answer, _XLNET),
    **_all("MultipleChoice", CHOSEN, _choice, {}),
    **_all("NextSentencePrediction", FOLLOWING, _two, {}),
    "PreTraining/bert": Entry("BertForPreTraining", _words_and("next_sentence_label")),
    "PreTraining/fnet": Entry("FNetForPreTraining", _words_and("next_sentence_label")),
    "PreTraining/albert": Entry("AlbertForPreTraining", _words_and("sentence_order_label")),
    "PreTraining/electra": Entry("ElectraForPreTraining", _replaced),
    "PreTraining/funnel": Entry("FunnelForPreTraining", _replaced),
    "PreTraining/visual_bert": Entry(
        "VisualBertForPreTraining", _with_regions, {"visual_embedding_dim": 32}
    ),
}
