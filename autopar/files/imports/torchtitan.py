"""torchtitan: a Python recipe of 0.3.0 or a TOML file of 0.2.

Of a recipe the assignments and calls are read, never run: values must be literals.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autopar.files.imports.settings import NotImported, Settings, several, whole
from autopar.nouns.errors import did_you_mean
from autopar.nouns.layout import Pins
from autopar.nouns.recompute import ATTENTION, FULL, Recompute

PARALLELISM = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "fsdp_reshard_after_forward",
    "tensor_parallel_degree",
    "enable_sequence_parallel",
    "disable_loss_parallel",
    "enable_async_tensor_parallel",
    "enable_fsdp_symm_mem",
    "spmd_backend",
    "pipeline_parallel_degree",
    "module_fqns_per_model_part",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
    "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv",
    "pipeline_parallel_microbatch_size",
    "pipeline_parallel_expert_parallel_overlap",
    "context_parallel_degree",
    "context_parallel_load_balancer",
    "context_parallel_rotate_method",
    "context_parallel_ptrr_mask_key",
    "expert_parallel_degree",
    "expert_tensor_parallel_degree",
    "expert_parallel_comm_backend",
)
"""Fields of ``parallelism`` in 0.2 and 0.3.0."""
NEWER = (
    "num_tokens_per_microbatch_per_dp_rank",
    "num_tokens_per_train_step",
    "num_pp_microbatches",
)
"""Fields of the development branch, whose batches are in tokens."""
SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved-1f1b",
    "loopedbfs": "breadth-first",
    "interleavedzerobubble": "zb-interleaved",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}
"""torch's names -> ours."""


def read(text: str, name: str) -> Settings:
    """Raises `NotImported`."""
    settings = _toml(text, name) if name.endswith(".toml") else _python(text, name)
    return _of_sections(settings, name)


def _of_sections(settings: dict[str, dict[str, Any]], name: str) -> Settings:
    p, t = settings.get("parallelism", {}), settings.get("training", {})
    for field in (*p, *t):
        if field in NEWER:
            raise NotImported(
                f"{name}: {field} is of torchtitan's development branch, whose batches are in "
                "tokens; autopar reads 0.2 and 0.3.0. Write local_batch_size and "
                "global_batch_size in sequences in its place"
            )
    for field in p:
        if field not in PARALLELISM:
            raise NotImported(
                f"{name}: parallelism.{field} is no field of torchtitan 0.2 or 0.3.0. "
                f"{did_you_mean(field, PARALLELISM)}Export a plan with `autopar export --to "
                "torchtitan` to see those of 0.3.0"
            )

    def degree(field: str, usual: int = 1) -> int:
        return whole(f"{name}: parallelism.{field}", p.get(field, usual))

    shard = p.get("data_parallel_shard_degree", -1)
    replicate = degree("data_parallel_replicate_degree")
    pp, cp, tp = (degree(f"{kind}_parallel_degree") for kind in ("pipeline", "context", "tensor"))
    local = whole(f"{name}: training.local_batch_size", t.get("local_batch_size", 8))
    microbatch = degree("pipeline_parallel_microbatch_size") if pp > 1 else local
    pins = several(
        dp_replicate=replicate,
        tp=tp,
        cp=cp,
        ep=degree("expert_parallel_degree"),
        pp=pp,
    )
    if pins.ep is not None:
        pins = replace(pins, etp=degree("expert_tensor_parallel_degree"))
    if shard != -1:
        count = whole(f"{name}: parallelism.data_parallel_shard_degree", shard)
        pins = replace(pins, dp_shard=count)
    pins = replace(pins, zero=_zero(p, shard, cp, pp), microbatch=microbatch)
    if pp > 1:
        pins = _pipeline(p, pins, pp, name)
    if tp > 1 and not p.get("enable_sequence_parallel", True):
        pins = replace(pins, sequence_parallel=False)
    notes = []
    match settings.get("activation_checkpoint", {}).get("mode", "none"):
        case "full":
            pins = replace(pins, recompute=Recompute(FULL))
        case "selective":
            pins = replace(pins, recompute=Recompute(ATTENTION))
            notes.append("SelectiveAC keeps more than attention: priced as Megatron's selective")
        case "memory_budget":
            notes.append("the memory budget of activation checkpointing is not priced")
    precision = {"bfloat16": "bf16", "float32": "fp32"}.get(
        str(t.get("mixed_precision_param", "bfloat16"))
    )
    batch = t.get("global_batch_size", -1)
    known = None if batch == -1 else whole(f"{name}: training.global_batch_size", batch)
    return Settings("torchtitan", pins, known, local, precision, tuple(notes))


def _zero(p: dict[str, Any], shard: object, cp: int, pp: int) -> int:
    """FSDP2 splits parameters; those that stay gathered until backward are as under ZeRO 2."""
    if shard == 1 and cp == 1:
        return 0
    match p.get("fsdp_reshard_after_forward", "default"):
        case "never":
            return 2
        case "default" if pp > 1:
            return 2
        case _:
            return 3


def _pipeline(p: dict[str, Any], pins: Pins, pp: int, name: str) -> Pins:
    asked = str(p.get("pipeline_parallel_schedule", "1F1B"))
    schedule = SCHEDULES.get(asked.lower())
    if schedule is None:
        raise NotImported(
            f"{name}: pipeline_parallel_schedule {asked} has no price here; there are "
            "1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble and "
            "DualPipeV"
        )
    parts = p.get("module_fqns_per_model_part")
    stages = parts if isinstance(parts, int) else len(parts) if parts else 0
    one_or_v = schedule in ("1f1b", "gpipe", "zb-v", "dualpipe-v")
    interleave = 1 if one_or_v else stages // pp if stages else 2
    return replace(pins, schedule=schedule, interleave=interleave if interleave > 1 else None)


def _toml(text: str, name: str) -> dict[str, dict[str, Any]]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NotImported(f"{name}: no TOML: {error}") from None
    return {section: dict(rows) for section, rows in tables.items() if isinstance(rows, dict)}


def _python(text: str, name: str) -> dict[str, dict[str, Any]]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise NotImported(f"{name}:{error.lineno}: no Python: {error.msg}") from None
    sections: dict[str, dict[str, Any]] = {"parallelism": {}, "training": {}}
    alias: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            section = _class(node.func)
            if section:
                sections[section] |= {k.arg: _value(k.value) for k in node.keywords if k.arg}
        if not isinstance(node, ast.Assign):
            continue
        for target, value in _pairs(node):
            if isinstance(target, ast.Name) and isinstance(value, ast.Attribute):
                alias[target.id] = value.attr
            if not isinstance(target, ast.Attribute):
                continue
            owner = target.value
            if isinstance(owner, ast.Attribute):
                section = owner.attr
            else:
                section = alias.get(owner.id, "") if isinstance(owner, ast.Name) else ""
            if section in ("parallelism", "training"):
                sections[section][target.attr] = _value(value)
            elif target.attr == "activation_checkpoint":
                sections["activation_checkpoint"] = {"mode": _checkpointing(value)}
    if not sections["parallelism"] and not sections["training"]:
        raise NotImported(
            f"{name} sets no field of torchtitan's parallelism or training; give the recipe's "
            "file, or a TOML file of 0.2"
        )
    return sections


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _class(node: ast.expr) -> str:
    """The section that ``ParallelismConfig(...)`` and its like make."""
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return {"ParallelismConfig": "parallelism", "TrainingConfig": "training"}.get(name, "")


def _value(node: ast.expr) -> Any:
    """A literal; of a list that is none, its length; else its text."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return len(node.elts) if isinstance(node, ast.List) else ast.unparse(node)


def _checkpointing(node: ast.expr) -> str:
    text = ast.unparse(node)
    kinds = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
    return next((mode for kind, mode in kinds.items() if kind in text), "none")
