"""The whole file: docstring, mesh, tables of parameters and batch, a function a block, the loss."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from autopar.emit import schedule
from autopar.emit.constants import literal
from autopar.emit.headings import count_of, state_held, train_heading
from autopar.emit.jax import parallel, train
from autopar.emit.jax.batch import batch_table, in_pieces, outputs_table
from autopar.emit.jax.functions import body
from autopar.emit.jax.how import How
from autopar.emit.jax.legend import WORDS
from autopar.emit.jax.own_derivatives import own_derivatives
from autopar.emit.jax.parameters import blocks_table, parameters_table, stacks_table
from autopar.emit.jax.printing import Marks, Printing
from autopar.emit.jax.shapes import shown, signature
from autopar.emit.jax.stages import stage_functions
from autopar.emit.legend import legend
from autopar.emit.names import BUILTINS, first_free, identifier, is_attribute
from autopar.emit.roles import Known, roles, unnamed
from autopar.emit.sizes import Sizes
from autopar.emit.text import Lines, tuple_text
from autopar.lowering.lowered import Lowered
from autopar.lowering.stages import stage_parts
from autopar.nouns.axes import MICROBATCH
from autopar.nouns.batch import BatchEntry
from autopar.nouns.graph import Block
from autopar.nouns.plan import Plan

FILE = "model.py"
OWN = (
    "BF16 FP16 FP32 Block Parameter Settings Stack Stage Value all_reduce all_to_all attention "
    "clamp conv copy_to cross_entropy derivative embedding gather keep_first layer layer_norm "
    "experts grouped_linear layers linear linear_cross_entropy pad reduce_scatter ring_attention "
    "rms_norm shard whole"
).split()
RESERVED = BUILTINS | frozenset((*OWN, "jax", "jnp", "lax", "loss", "partial", "Array", "P"))


ABOUT_PARALLEL = (
    "What model.py and train.py import: jax and numpy are all that is needed beside.",
    "",
    "{} makes a jitted step of model.py's {} and train.py's functions; the rest is",
    "what these call. Nothing here depends on the model.",
)


_WHERE = ("`loss` runs on the pieces of one device, inside one `jax.shard_map`. A comment gives",)
_WHERE_STAGES = (
    "STAGES says what each stage is, takes and gives. A function of a stage runs on the pieces",
    "of one device of its place on pp, inside one `jax.shard_map`; `params` are those of the stage",
    "alone, whose layers count from 0. What is called when stands in schedule.txt. A comment gives",
)


class CapturedModel(Protocol):
    """What the frontend knows of the model beside its graph."""

    @property
    def batch(self) -> tuple[BatchEntry, ...]: ...
    @property
    def samples(self) -> int: ...
    @property
    def stacks(self) -> Mapping[str, tuple[str, ...]]: ...


def emit(
    lowered: Lowered,
    plan: Plan,
    captured: CapturedModel,
    probes: bool = False,
    marks: bool = False,
) -> dict[str, str]:
    """The files of the program by name. Raises `JaxEmitError` and `UnevenPieces`.

    ``marks`` says above statements what they make; ``probes`` does so for every op, one a line.
    """
    marked: Marks = "each" if probes else "statements" if marks else "none"
    stages = stage_parts(lowered, plan.stages) if len(plan.stages) > 1 else ()
    mesh = plan.program_mesh
    functions = _block_names(lowered)
    own, definitions = own_derivatives(lowered, RESERVED | frozenset(functions.values()))
    functions |= own
    reserved = RESERVED | frozenset(functions.values())
    sizes = Sizes.of(lowered, captured.batch)
    printing = Printing(functions, reserved, marked, sizes, _arguments(lowered), plan.scatters)
    parts = [
        *definitions,
        *(
            _block_function(repeated, lowered.graph.blocks[name], printing)
            for name, repeated in lowered.blocks.items()
        ),
    ]
    staged: list[str] = []
    if stages:
        more, staged = stage_functions(stages, plan, lowered, printing)
        parts += more
    else:
        parts.append(_loss_function(lowered, captured, printing))
    tables = [
        f"MESH = {_degrees(dict(zip(mesh.axes, mesh.sizes, strict=True)))}",
        *_settings(plan, captured, lowered),
        *printing.sizes.lines("\n".join([*parts, *staged])),
        "",
        *parameters_table(lowered),
        "",
        *blocks_table(lowered, stages),
        *stacks_table(captured.stacks),
        "",
        *batch_table(_read(captured), lowered, plan.microbatches),
        *([] if stages else outputs_table(lowered)),
    ]
    parts += ["\n".join(staged)] * bool(staged)
    code = "\n".join(tables) + "\n\n\n" + "\n\n\n".join(parts) + "\n"
    model = f"{_docstring(lowered, plan, captured, code)}\n\n{_imports(code)}\n\n{code}"
    step = train.train_text(_how(plan, captured, lowered, code))
    names = ("`Pipeline`", "STAGES") if stages else ("`Step`", "`loss`")
    about = [line.format(*names) for line in ABOUT_PARALLEL]
    base = parallel.parallel_text((model, step), about)
    files = {FILE: model, train.FILE: step, parallel.FILE: base}
    return files | ({schedule.FILE: schedule.schedule_file(plan)} if stages else {})


def _block_names(lowered: Lowered) -> dict[str, str]:
    """Of each block its function's name: ``block`` of ``blocks``, ``decoder_layer`` where there are
    layers of an encoder too."""
    last = Counter(name.rpartition(".")[2] for name in lowered.blocks)
    names: dict[str, str] = {}
    for block in lowered.blocks:
        path = block.split(".")
        several = len(path) > 1 and last[path[-1]] > 1
        hint = identifier("_".join(path[-2:] if several else path[-1:]))
        hint = hint.removesuffix("s") if len(hint) > 2 else f"{hint}_block"
        hint = f"{hint}_block" if hint in RESERVED else hint
        while hint in (*RESERVED, *names.values()):
            hint += "_"
        names[block] = hint
    return names


def _arguments(lowered: Lowered) -> dict[str, dict[str, str]]:
    """By block, names of the inputs that have none of their own: what they are read as, else what
    the first caller's source calls what it gives."""
    names: dict[str, dict[str, str]] = {}
    outside = Known.of(lowered)
    for op in lowered.ops:
        if op.op.kind != "block" or op.op.attrs["block"] in names:
            continue
        block = op.op.attrs["block"]
        inside = roles(lowered.blocks[block])
        own = names[block] = {}
        for name, given in zip(lowered.blocks[block].graph.inputs, op.op.inputs, strict=True):
            hint = inside.get(name) or outside.assigned.get(given, "")
            hint = hint or outside.statements.get(given, "")
            if not hint and lowered.graph.tensors[given].differentiable:
                hint = "context"
            taken = {*lowered.blocks[block].graph.inputs, *own.values(), "p"}
            if unnamed(name) and hint and hint not in taken:
                own[name] = hint
    return names


def _how(plan: Plan, captured: CapturedModel, lowered: Lowered, code: str) -> How:
    """What the text of a step follows from."""
    mesh = plan.program_mesh
    return How(
        mesh=mesh,
        zero=plan.stages[0].zero,
        microbatches=plan.microbatches,
        clip_norm=plan.clip_norm,
        deferred=", deferred=(" in code,
        pieces=any(map(in_pieces, (lowered, *lowered.blocks.values()))),
        optimizer=plan.optimizer,
        precision=plan.precision,
        draws=not all(entry.given for entry in captured.batch),
        stacks=bool(captured.stacks),
        workload=plan.workload.rpartition("/")[2],
        slots={"adamw": ("m", "v")}.get(plan.optimizer, ()),
        frozen=", frozen=True)" in code,
        outputs="OUTPUTS = (" in code,
        schedule=plan.schedule if len(plan.stages) > 1 else "",
        reduce=plan.reduce_dtype or "",
        scatters=plan.scatters,
        about=tuple(
            train_heading(
                plan,
                captured.samples,
                "python",
                ranks="device",
                again="by SETTINGS of model.py",
                called="`hold`, `prepared`, `summed` and `update`"
                if len(plan.stages) > 1
                else "`hold`, `prepared`, `backward` and `update`",
            )
        ),
    )


def _degrees(by_axis: Mapping[str, int]) -> str:
    return f"{{{', '.join(f'{literal(axis)}: {n}' for axis, n in by_axis.items())}}}"


def _settings(plan: Plan, captured: CapturedModel, lowered: Lowered) -> list[str]:
    whole = tuple(e.name for e in _read(captured) if e.batch_dim is None and e.shape)
    half = plan.precision != "float32"
    counts = tuple(e.name for e in captured.batch if half and e.kind == "count")
    lines = Lines(0)
    lines.add(
        f"SETTINGS = Settings(zero={plan.each('zero')}, microbatches={plan.microbatches}, "
        f'precision="{plan.precision}", recompute="{plan.each("recompute")}"'
        + (f", whole_inputs={tuple_text(whole)}" if whole else "")
        + (f", counts={tuple_text(counts)}" if counts else "")
        + (f', order="{lowered.order}"' if lowered.order != "contiguous" else "")
        + (f', reduce_dtype="{plan.reduce_dtype}"' if plan.reduce_dtype else "")
        + (f", scatters={_degrees(plan.scatters)}" if plan.scatters else "")
        + ")"
    )
    return lines.lines


def _read(captured: CapturedModel) -> list[BatchEntry]:
    """The entries that a program is given."""
    return [entry for entry in captured.batch if entry.kind != "key"]


def _block_function(lowered: Lowered, block: Block, printing: Printing) -> str:
    arguments, lines = body(lowered, "p", printing)
    given = [
        f"{variable} {shown(lowered.graph.tensors[n], lowered.tensors[n].produced, lowered)}"
        for variable, n in zip(arguments, lowered.graph.inputs, strict=True)
    ]
    made = [shown(lowered.graph.tensors[o.name], o.wanted, lowered) for o in lowered.outputs]
    doc = f'    """{", ".join(given)} -> {", ".join(made)}"""'
    typed = ["p: dict[str, Array]", *(f"{name}: Array" for name in arguments)]
    head = signature(printing.functions[block.name], typed, len(made))
    return "\n".join([*head, doc, *lines])


def _loss_function(lowered: Lowered, captured: CapturedModel, printing: Printing) -> str:
    arguments, lines = body(lowered, "params", printing, lowered.outputs[0].name)
    variables = dict(zip(lowered.graph.inputs, arguments, strict=True))
    odd = [n for n in variables if not is_attribute(n) or n in (*RESERVED, "params")]
    keyed = [n for n in variables if n not in odd]
    rest = first_free(["others", "other"], (*arguments, *keyed))
    renamed = [f"    {variables[n]} = {n}" for n in keyed if variables[n] != n]
    renamed += [f"    {variables[n]} = {rest}[{literal(n)}]" for n in odd]
    others = " Behind it OUTPUTS." if lowered.outputs[1:] else ""
    doc = (
        f'    """This device\'s share: summed over data axes and microbatches, the loss.{others}"""'
    )
    entries = [e.name for e in _read(captured)]  # in the order of BATCH; calls give keywords
    given = sorted(keyed, key=lambda name: entries.index(name) if name in entries else len(entries))
    stacks = " | Stack" if lowered.blocks else ""
    typed = [f"params: dict[str, Array{stacks}]", *["/"] * ("params" in odd)]
    typed += [*(f"{name}: Array" for name in given), *[f"**{rest}: Array"] * bool(odd)]
    head = signature("loss", typed, len(lowered.outputs))
    return "\n".join([*head, doc, *renamed, *lines])


def _imports(code: str) -> str:
    used = [name for name in OWN if re.search(rf"(?<![\w.\"]){name}\b", code)]
    lines = ["from __future__ import annotations", ""]
    if re.search(r"\bpartial\(", code):
        lines += ["from functools import partial", ""]
    if re.search(r"\bjax\.", code):
        lines.append("import jax")
    if "jnp." in code:
        lines.append("import jax.numpy as jnp")
    lines.append("from jax import Array" + ", lax" * bool(re.search(r"\blax\.", code)))
    lines += ["from jax.sharding import PartitionSpec as P", ""]
    block = Lines(0)
    ordered = sorted(used, key=lambda n: (not n.isupper(), n[0].islower(), n))
    lines.append(f"from {parallel.NAME} import (")
    lines += [f"    {name}," for name in ordered]
    return "\n".join([*lines, *block.lines, ")"])


def _docstring(lowered: Lowered, plan: Plan, captured: CapturedModel, code: str) -> str:
    mesh = plan.program_mesh
    size = lowered.mesh.size(MICROBATCH)
    devices = count_of(mesh.device_count, "device")
    return "\n".join(
        [
            f'"""{plan.workload.rpartition("/")[2]} on {devices}: {mesh}.',
            "",
            f"Batch:     {captured.samples} samples in {count_of(size, 'microbatch', 'es')}.",
            f"State:     {state_held(plan, 'device')}.",
            f"Precision: {plan.precision}.",
            "",
            *(_WHERE_STAGES if len(plan.stages) > 1 else _WHERE),
            "a result's shape there, for one microbatch, and how the model axes hold it where it",
            "is not whole on every device. Collectives are the calls that name an axis.",
            "",
            *([*words, ""] if (words := legend(code, WORDS, "device")) else []),
            "The decisions stand in ../plan.json; train.py makes training steps of this.",
            '"""',
        ]
    )
