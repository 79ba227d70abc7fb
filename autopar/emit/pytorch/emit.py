"""The whole file: docstring, mesh, classes from the inside out, the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.emit import schedule
from autopar.emit.constants import literal
from autopar.emit.headings import count_of, train_heading
from autopar.emit.names import FUNCTIONS, LAYERS, is_attribute
from autopar.emit.pytorch import train
from autopar.emit.pytorch.bias import fuse_biases
from autopar.emit.pytorch.classes import (
    Library,
    Printing,
    block_class,
    module_tree,
)
from autopar.emit.pytorch.counts import count_names
from autopar.emit.pytorch.experts import named_layers, placed_matrices, tokens_in_pieces
from autopar.emit.pytorch.gathering import gather_modules
from autopar.emit.pytorch.legend import legend, state
from autopar.emit.pytorch.masks import as_bands, as_bounds
from autopar.emit.pytorch.normalised import as_normalised
from autopar.emit.pytorch.original import CapturedModel
from autopar.emit.pytorch.parts import without_detours
from autopar.emit.pytorch.pieces import in_pieces
from autopar.emit.pytorch.precision import wide_values
from autopar.emit.pytorch.shared_experts import run_beside
from autopar.emit.pytorch.stages import stage_classes
from autopar.emit.pytorch.top import model_class
from autopar.emit.pytorch.units import forward_only, gathered_narrow, units_of
from autopar.emit.pytorch.views import shorter_views
from autopar.emit.pytorch.widths import with_arguments
from autopar.emit.sizes import NONE, Sizes
from autopar.emit.text import Lines
from autopar.lowering.collectives import tells_units
from autopar.lowering.counts import counted
from autopar.lowering.lowered import BATCH_AXES, Lowered
from autopar.lowering.precision import HALF
from autopar.lowering.scopes import scopes
from autopar.lowering.stages import StagePart, stage_parts
from autopar.nouns.axes import MICROBATCH, SEQUENCES, SHARING, SLICE
from autopar.nouns.buckets import MIB
from autopar.nouns.offload import OFFLOAD
from autopar.nouns.plan import Plan
from autopar.nouns.reduction import ranks_inside
from autopar.pipeline.schedules.of_plan import schedule_of

FILE = "model.py"
_OWN = "FP32 Buffer Modules Parameter Settings Stage Value Weights".split()
OWN = re.compile(rf"(?<![\w.])({'|'.join(sorted({*_OWN, *FUNCTIONS, *LAYERS}))})\(")


def emit(
    lowered: Lowered,
    plan: Plan,
    captured: CapturedModel | None = None,
    probes: bool = False,
    marks: bool = False,
) -> dict[str, str]:
    """The files of the program by name.

    ``probes`` writes every result through ``probe(key, x, sharding)``, one op a line; ``marks``
    leaves the statements as they are and says above them what they make.
    """
    sizes = NONE if captured is None else Sizes.of(lowered, captured.batch)
    placed = placed_matrices(lowered.graph, plan.expert_placement)

    def prepared(part: Lowered) -> Lowered:
        return _prepared(named_layers(part, placed), probes, sizes)

    blocks = {name: prepared(block) for name, block in lowered.blocks.items()}
    parts = stage_parts(lowered, plan.stages) if len(plan.stages) > 1 else ()
    whole, lowered = lowered, prepared(lowered)
    means = counted(whole)
    persistent = {} if captured is None else {n: t.persistent for n, t in captured.tensors.items()}
    again, names = plan.stages[0].recompute, count_names(means)
    half = plan.precision if plan.precision in HALF else ""
    wide = _wide(lowered, blocks, plan.precision) if half else {}
    original: Mapping[str, str] = getattr(captured, "classes", {})  # not every frontend knows
    printing = Printing(
        Library(), probes, marks, again, persistent, names, wide, original, half, sizes=sizes,
        placed=placed,
    )  # fmt: skip
    classes: dict[str, str] = {}
    for name, block in blocks.items():
        instances = lowered.graph.blocks[name].instances
        made = block_class(block, scopes(block), instances[0], _class_name(name), printing)
        classes.update(dict.fromkeys(instances, made))
    if parts:
        ready = [replace(p, lowered=prepared(p.lowered)) for p in parts]
        top = stage_classes(ready, parts, whole, plan, captured, printing, classes)
    else:
        scope = scopes(lowered)
        root = module_tree(scope, lowered, "", printing, classes)
        top = f"class Model{model_class(lowered, scope, root, captured, printing)}"
    model = _file(lowered, plan, captured, printing, top)
    files = {FILE: model, train.FILE: train.train_text(_how(whole, plan, captured, model, parts))}
    return files | ({schedule.FILE: schedule.schedule_file(plan)} if parts else {})


def _how(
    lowered: Lowered,
    plan: Plan,
    captured: CapturedModel | None,
    model: str,
    parts: Sequence[StagePart],
) -> train.How:
    """What the text of a step follows from."""
    zero = max(stage.zero for stage in plan.stages)
    every = [
        value
        for body in (lowered, *lowered.blocks.values())
        for value in body.tensors.values()
        if value.tensor.role == "parameter"
    ]
    late = any(
        (placement.kind == "D" and axis not in BATCH_AXES)
        or (placement.kind == "S" and axis in SHARING)
        for value in every
        for axis, placement in value.produced.placements
    )
    alone = any(not value.tensor.shape or 0 in value.tensor.shape for value in every)
    mesh = plan.program_mesh
    start = f"torchrun --nproc-per-node {mesh.device_count}"
    samples = 0 if captured is None else captured.samples
    return train.How(
        mesh=mesh,
        zero=zero,
        microbatches=plan.microbatches,
        seq_slices=plan.seq_slices or 1,
        clip_norm=plan.clip_norm,
        staged=len(plan.stages) > 1,
        counts="def counts(" in model,
        late=late or (alone and zero > 0 and bool(mesh.sharing())),
        tied=_tied(parts, plan),
        optimizer=plan.optimizer,
        schedule=plan.schedule,
        offloads=plan.each("offload") != OFFLOAD[0],
        scales=plan.precision == "float16",
        style=plan.style,
        carries=any(
            op.op.kind == "carry" for body in (lowered, *lowered.blocks.values()) for op in body.ops
        ),
        limits="limits=" in model,
        two_level=ranks_inside(plan.all_reduce) or 0,
        about=tuple(
            train_heading(
                plan,
                samples,
                start,
                ranks="rank",
                again="by `recompute` in model.py",
                called="`hold`, `backward` and `update`",
            )
        ),
    )


def _tied(parts: Sequence[StagePart], plan: Plan) -> bool:
    """Whether a parameter is held by several stages."""
    if not parts:
        return False
    held = [name for part in parts for name, _ in part.lowered.graph.parameters()]
    again = len(schedule_of(plan).ranks) > len(parts)  # a second pipeline through the same parts
    return again or len(set(held)) < len(held)


def _prepared(lowered: Lowered, probes: bool, sizes: Sizes) -> Lowered:
    lowered = gather_modules(lowered)
    if probes:  # one op a line
        return lowered
    for rewrite in (without_detours, fuse_biases, as_bands, as_bounds):
        lowered = rewrite(lowered)
    lowered = in_pieces(as_normalised(shorter_views(lowered, sizes)))
    return run_beside(tokens_in_pieces(lowered))


def _wide(
    lowered: Lowered, blocks: Mapping[str, Lowered], precision: str
) -> dict[str, dict[str, bool]]:
    """For the top level ("") and every block, which float32 values stay so in half precision."""
    every = {"": lowered, **blocks}
    return {name: wide_values(one, precision) for name, one in every.items()}


def _class_name(name: str) -> str:
    """Blocks are named after the original class: ``LlamaDecoderLayer``, ``LlamaDecoderLayer_1``."""
    base = re.sub(r"_(\d+)$", "", name)
    spelled = re.sub(r"\W", "", base.split(".")[-1])
    spelled = spelled[:1].upper() + spelled[1:]
    return spelled if is_attribute(spelled) else "Block"


def _file(
    lowered: Lowered,
    plan: Plan,
    captured: CapturedModel | None,
    printing: Printing,
    top: str,
) -> str:
    classes, top = with_arguments(printing.library.texts, printing.library.hints, top)
    functions = [f"def {name}{text}" for name, text in printing.library.functions.items()]
    every = [*functions, *(f"class {name}{text}" for name, text in classes.items()), top]
    body = "\n\n\n".join(every)
    settings = _settings(lowered, plan, captured)
    names = {"Settings"} | {m for m in OWN.findall(body)}
    if re.search(r"\bFP32\b", body):
        names.add("FP32")
    head = [
        _docstring(lowered, plan, captured, body),
        "",
        "from __future__ import annotations",
        "",
    ]
    if re.search(r"\btorch\.", body):
        head.append("import torch")
    if re.search(r"\bF\.", body):
        head.append("import torch.nn.functional as F")
    head += ["from torch import Tensor, nn", ""]
    if printing.probes:
        head.append("from autopar.runtime.pytorch.probe import probe")
    head += _imports(names)
    head.append("")
    mesh = plan.program_mesh
    sizes = ", ".join(f'"{a}": {n}' for a, n in zip(mesh.axes, mesh.sizes, strict=True))
    head += [f"MESH = {{{sizes}}}", *settings, *printing.sizes.lines(body), "", ""]
    return "\n".join(head) + "\n" + body + "\n"


def _imports(names: set[str]) -> list[str]:
    """Sorted as ruff's isort does: constants, classes, functions."""
    ordered = sorted(names, key=lambda n: (0 if n.isupper() else 1 if n[0].isupper() else 2, n))
    line = f"from autopar.runtime.pytorch.program import {', '.join(ordered)}"
    if len(line) <= 100:
        return [line]
    return ["from autopar.runtime.pytorch.program import (", *(f"    {n}," for n in ordered), ")"]


def _settings(lowered: Lowered, plan: Plan, captured: CapturedModel | None) -> list[str]:
    zero = max(stage.zero for stage in plan.stages)
    given = [f"zero={zero}", f"microbatches={plan.microbatches}"]
    given += [f"seq_slices={plan.seq_slices}"] if plan.seq_slices is not None else []
    given += [f'precision="{plan.precision}"', f'recompute="{plan.each("recompute")}"']
    if plan.each("offload") != OFFLOAD[0]:
        given.append(f'offload="{plan.each("offload")}"')
    if plan.bucket_bytes is not None:
        given.append(f"bucket_mib={plan.bucket_bytes // MIB}")
    if plan.reduce_dtype is not None:
        given.append(f'reduce_dtype="{plan.reduce_dtype}"')
    if plan.prefetch is not None:
        given.append(f"prefetch={plan.prefetch}")
    if plan.gather_dtype is not None:
        given.append(f"narrow={literal(gathered_narrow(lowered.graph))}")
    if inside := ranks_inside(plan.all_reduce):
        given.append(f"two_level={inside}")
    if plan.expert_placement:
        placed = (
            f"{literal(n)}: {literal(p.ranks)}" for n, p in sorted(plan.expert_placement.items())
        )
        given.append(f"placed={{{', '.join(placed)}}}")
    in_order = tells_units(plan)
    units = units_of(lowered, in_order)
    given.append(f"units={literal(units)}")
    if in_order and (ahead := forward_only(lowered)):
        given.append(f"forward_only={literal(ahead)}")
    if captured is not None:
        whole = tuple(e.name for e in captured.batch if e.batch_dim is None)
        if whole:
            given.append(f"whole_inputs={literal(whole)}")
        if alike := [f"{literal(e.name)}: {e.numbers}" for e in captured.batch if e.numbers]:
            given.append(f"alike={{{', '.join(alike)}}}")
        if limits := [(n, *t.limits) for n, t in captured.tensors.items() if t.limits]:
            given.append(f"limits={literal(limits)}")
    inputs = {n: lowered.tensors[n].produced for n in lowered.graph.inputs}
    along = (SLICE, *SEQUENCES)
    cut = (n for n, placed in inputs.items() if any(placed.on(a).kind == "S" for a in along))
    if sequences := tuple(cut):
        given.append(f"sequences={literal(sequences)}")
        given += ['order="zigzag"'] if lowered.zigzag is not None else []
    lines = Lines(0)
    lines.add(f"SETTINGS = Settings({', '.join(given)})")
    return lines.lines


def _docstring(lowered: Lowered, plan: Plan, captured: CapturedModel | None, body: str) -> str:
    mesh = plan.program_mesh
    ranks = mesh.device_count
    size = lowered.mesh.size(MICROBATCH)
    micro = count_of(size, "microbatch", "es")
    if plan.seq_slices is not None:
        micro += f", each in {plan.seq_slices} slices of its sequences"
    of = "slice" if plan.seq_slices is not None else "microbatch"
    samples = "" if captured is None else f"{captured.samples} samples in "
    model = plan.workload.rpartition("/")[2]
    lines = [
        f'"""{model} on {ranks} rank{"s" if ranks != 1 else ""}: {mesh}.',
        "",
        f"Batch:     {samples}{micro}; shapes below are those of one {of} on one rank.",
        *([f"Schedule:  {plan.schedule} over {len(plan.stages)} stages."] * (len(plan.stages) > 1)),
        "State:     " + f"\n{'':11}".join(state(plan)),
        f"Precision: {plan.precision}.",
        "",
        "A comment gives a result's local shape, and how the model axes hold it where it is not",
        "whole on every rank. Collectives are the calls that name an axis.",
        "",
        *legend(body, lowered),
        "",
        "The decisions stand in ../plan.json; train.py makes training steps of this.",
        '"""',
    ]
    return "\n".join(lines)
