"""Levanter 0.2.227: the trainer's part of its YAML."""

from __future__ import annotations

from typing import Any

import yaml

from autopar.emit.exports import sizes as sizes_of
from autopar.emit.exports.held import FLOAT32, state_note
from autopar.emit.exports.jax_trainers import mesh_limits
from autopar.emit.exports.setup import Setup
from autopar.emit.exports.sizes import in_words, plain, sized
from autopar.emit.exports.text import (
    Export,
    Limit,
    header,
    no_degrees,
    not_carried,
    recomputes,
    refuse_beyond,
)
from autopar.nouns.axes import CONTEXT, EXPERT, PIPELINE

NAME = "levanter"


def export(setup: Setup) -> Export:
    """``levanter.yaml``. Raises `Refused`."""
    refuse_beyond(NAME, _limits(setup))
    sizes = sized(setup)
    llama = sizes_of.levanter(sizes, setup.sequence) if sizes is not None and plain(sizes) else {}
    kept = "" if setup.held is None else setup.held.kept
    left_out = not_carried(
        setup,
        "the data and tokenizer, whose vocabulary the model takes: add data:"
        if llama
        else f"the model{in_words(setup)} and its data: add model: and data:",
        "" if kept == "bfloat16" else state_note(setup.held, FLOAT32, "Levanter"),
        f"ZeRO {setup.layout.zero}: parameters are split over data, as ZeRO 3"
        if setup.layout.zero in (1, 2) and setup.layout.dp_shard > 1
        else "",
        "sequence parallelism over tp"
        if setup.layout.sequence_parallel and setup.layout.tp > 1
        else "",
        "selective recompute: model.gradient_checkpointing recomputes whole layers"
        if recomputes(setup) == "selective"
        else "",
    )
    short = {"float32": "f32", "bfloat16": "bfloat16", "float16": "float16"}
    split = setup.layout.zero > 0 and setup.layout.dp_shard > 1
    trainer: dict[str, Any] = {
        "mp": f"p={'bfloat16' if kept == 'bfloat16' else 'f32'},c={short[setup.precision]}",
        "train_batch_size": setup.layout.global_batch,
        "per_device_parallelism": setup.layout.microbatch,
        "mesh": {
            "axes": {
                "replica": setup.layout.dp_replicate,
                "data": setup.layout.dp_shard,
                "model": setup.layout.tp,
            },
            "param_mapping": {"embed": "data"} if split else {},
            "shared_mapping": {"mlp": "model", "heads": "model"} if setup.layout.tp > 1 else {},
        },
    }
    settings: dict[str, Any] = {
        "model": {**llama, "gradient_checkpointing": recomputes(setup) != "none"},
        "trainer": trainer,
    }
    if setup.trains:
        settings["optimizer"] = {
            "type": "adam" if setup.optimizer == "adamw" else setup.optimizer,
            "max_grad_norm": setup.clip_norm,
            "learning_rate": float(setup.training["learning_rate"]),
            "weight_decay": float(setup.training["weight_decay"]),
        }
    start = "python -m levanter.main.train_lm --config_path levanter.yaml"
    opening = header(setup, "Levanter 0.2.227", left_out) + f"# {start}\n"
    text = opening + yaml.safe_dump(settings, sort_keys=False)
    return Export({"levanter.yaml": text}, left_out, start)


def _limits(setup: Setup) -> tuple[Limit, ...]:
    absent = dict.fromkeys((PIPELINE, CONTEXT, EXPERT), "its mesh is replica x data x model")
    return (*mesh_limits(setup), *no_degrees(setup, absent, "maxtext or axlearn"))
