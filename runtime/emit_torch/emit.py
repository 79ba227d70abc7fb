"""The whole file: docstring, mesh, classes from the inside out, the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from autopar.lowering import BATCH_AXES, MICROBATCH, Lowered
from autopar.nouns.plan import Plan
from autopar.precision import HALF
from autopar.runtime.emit_torch import modules
from autopar.runtime.emit_torch.bias import fuse_biases
from autopar.runtime.emit_torch.classes import (
    Library,
    Printing,
    block_class,
    finish,
    module_tree,
    surroundings,
)
from autopar.runtime.emit_torch.counts import (
    count_names,
    counted,
    held_whole,
    labels_of,
    labels_only,
)
from autopar.runtime.emit_torch.forward import Forward
from autopar.runtime.emit_torch.gathering import gather_modules
from autopar.runtime.emit_torch.legend import legend, state
from autopar.runtime.emit_torch.masks import as_bands, as_bounds
from autopar.runtime.emit_torch.names import FUNCTIONS, first_free, identifier
from autopar.runtime.emit_torch.normalised import as_normalised
from autopar.runtime.emit_torch.precision import wide_values
from autopar.runtime.emit_torch.scopes import Scope, scopes
from autopar.runtime.emit_torch.site import EmitError
from autopar.runtime.emit_torch.text import Lines, literal, split_items
from autopar.runtime.emit_torch.views import shorter_views

FILE = "model.py"
OWN = re.compile(
    rf"(?<![\w.])(FP32|Buffer|Parameter|Settings|Weights|{'|'.join(sorted(FUNCTIONS))})\("
)


class CapturedTensor(Protocol):
    """What the emitter asks of a tensor of the original model."""

    @property
    def name(self) -> str: ...
    @property
    def persistent(self) -> bool: ...
    @property
    def shared_with(self) -> tuple[str, ...]: ...


class CapturedEntry(Protocol):
    """One tensor of the batch."""

    @property
    def name(self) -> str: ...
    @property
    def batch_dim(self) -> int | None: ...


class CapturedModel(Protocol):
    """What the frontend knows of the model beside its graph."""

    @property
    def tensors(self) -> Mapping[str, CapturedTensor]: ...
    @property
    def batch(self) -> tuple[CapturedEntry, ...]: ...
    @property
    def samples(self) -> int: ...


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
    blocks = {name: _prepared(block, probes) for name, block in lowered.blocks.items()}
    lowered = _prepared(lowered, probes)
    means = counted(lowered)
    persistent = {} if captured is None else {n: t.persistent for n, t in captured.tensors.items()}
    again, names = plan.recompute, count_names(means)
    half = plan.precision if plan.precision in HALF else ""
    wide = _wide(lowered, blocks, plan.precision) if half else {}
    original: Mapping[str, str] = getattr(captured, "classes", {})  # not every frontend knows
    printing = Printing(Library(), probes, marks, again, persistent, names, wide, original, half)
    classes: dict[str, str] = {}
    for name, block in blocks.items():
        instances = lowered.graph.blocks[name].instances
        made = block_class(block, scopes(block), instances[0], _class_wish(name), printing)
        classes.update(dict.fromkeys(instances, made))
    scope = scopes(lowered)
    root = module_tree(scope, lowered, "", printing, classes)
    model = _model(lowered, scope, root, captured, printing)
    return {FILE: _file(lowered, plan, captured, printing, model)}


def _prepared(lowered: Lowered, probes: bool) -> Lowered:
    lowered = gather_modules(lowered)
    if probes:  # one op a line
        return lowered
    for rewrite in (fuse_biases, as_bands, as_bounds, shorter_views, as_normalised):
        lowered = rewrite(lowered)
    return lowered


def _wide(
    lowered: Lowered, blocks: Mapping[str, Lowered], precision: str
) -> dict[str, dict[str, bool]]:
    """For the top level ("") and every block, which float32 values stay so in half precision."""
    every = {"": lowered, **blocks}
    return {name: wide_values(one, precision) for name, one in every.items()}


def _class_wish(name: str) -> str:
    """Blocks are named after the original class: ``LlamaDecoderLayer``, ``LlamaDecoderLayer_1``."""
    base = re.sub(r"_(\d+)$", "", name)
    found = re.sub(r"\W", "", base.split(".")[-1])
    found = found[:1].upper() + found[1:]
    return found if found and not found[0].isdigit() else "Block"


def _model(
    lowered: Lowered,
    scope: Scope,
    root: modules.Node,
    captured: CapturedModel | None,
    printing: Printing,
) -> str:
    lines = Lines(4)
    lines.add('"""The whole model on one rank; see the top of this file."""')
    lines.blank()
    lines.add("def __init__(self) -> None:")
    inner = Lines(8)
    modules.declare(root, inner)
    for name, tensor in {} if captured is None else captured.tensors.items():
        for alias in tensor.shared_with:
            owner = alias.rpartition(".")[0]
            if name in lowered.tensors and owner and _exists(root, owner):
                inner.add(f"{modules.access(root, alias)} = {modules.access(root, name)}  # tied")
    lines.lines += inner.lines
    lines.blank()
    if printing.counts:
        _counts(lowered, lines, printing, root)
    around = surroundings(scope, lowered, root, printing)
    names = {n: identifier(n) for n in lowered.graph.inputs}
    if any(n != v for n, v in names.items()):
        raise EmitError(f"batch entries {[n for n, v in names.items() if n != v]} are no names")
    forward = Forward(scope, around, names, lowered.outputs)
    returned = forward.run()
    divided = _copies(lowered)
    if divided > 1:
        returned = f"({returned}) / {divided}" if " " in returned else f"{returned} / {divided}"
    arguments = ["self", *(f"{n}: Tensor" for n in lowered.graph.inputs)]
    if printing.counts:
        arguments.append("counts: dict[str, Tensor]")
    lines.add(f"def forward({', '.join(arguments)}) -> Tensor:")
    lines.add('    """This rank\'s share: summed over data ranks and microbatches, the loss."""')
    finish(lines, forward, returned)
    return "\n".join([f"({modules.base(root)}):", *lines.lines])


def _exists(root: modules.Node, path: str) -> bool:
    for part in path.split("."):
        if part not in root.children:
            return False
        root = root.children[part]
    return True


def _copies(lowered: Lowered) -> int:
    """How many data ranks and microbatches hold the same whole loss."""
    found = 1
    for axis in lowered.mesh.axes:
        if axis in BATCH_AXES and lowered.outputs[0].wanted.on(axis).kind != "P":
            found *= lowered.mesh.size(axis)
    return found


def _counts(lowered: Lowered, lines: Lines, printing: Printing, root: modules.Node) -> None:
    """``counts``: labelled tokens of one microbatch, by the name of the mean."""
    ops = counted(lowered)
    part = labels_only(lowered, ops)
    scope = Scope("", [*part.ops])
    plain = Printing(printing.library, False, False, "none", {}, {}, {}, {})
    names = [n for n in part.graph.inputs if any(n in o.op.inputs for o in part.ops)]
    names += [o.name for o in part.outputs if o.name in part.graph.inputs and o.name not in names]
    forward = Forward(
        scope,
        surroundings(scope, part, root, plain),
        {n: identifier(n) for n in names},
        part.outputs,
    )
    inner = forward.lines
    if part.ops:
        for name in names:
            inner.add(f"{identifier(name)} = batch[{literal(name)}]")
    labels: dict[str, str] = {}
    for output, text in zip(part.outputs, split_items(forward.run()), strict=True):
        if not part.ops:
            text = f"batch[{literal(output.name)}]"
        elif not text.isidentifier():
            var = first_free(("labels",), labels.values())
            inner.add(f"{var} = {text}")
            text = var
        labels[output.name] = text
    entries = []
    for op in ops:
        ignored = op.op.attrs.get("ignore_index", -100)
        key = printing.counts[op.op.name].removeprefix("counts[").removesuffix("]")
        name = labels_of(lowered, op)
        found = f"({labels[name]} != {ignored}).sum()"
        for axis in held_whole(part, name):  # labels that the batch does not give
            found = f'keep_first({found}, "{axis}")'
        entries.append(f"{key}: {found}")
    lines.add("@staticmethod")
    lines.add("def counts(batch: dict[str, Tensor]) -> dict[str, Tensor]:")
    lines.add('    """Labelled tokens of one microbatch; the runtime sums them over the batch."""')
    inner.add(f"return {{{', '.join(entries)}}}")
    lines.lines += inner.lines
    lines.blank()


def _file(
    lowered: Lowered,
    plan: Plan,
    captured: CapturedModel | None,
    printing: Printing,
    model: str,
) -> str:
    parts = []
    for name, text in printing.library.texts.items():
        parts.append(f"class {name}{text}")
    parts.append(f"class Model{model}")
    body = "\n\n\n".join(parts)
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
        head.append("from autopar.runtime.probe import probe")
    head += [*_imports(names), ""]
    mesh = plan.stages[0].mesh
    sizes = ", ".join(f'"{a}": {n}' for a, n in zip(mesh.axes, mesh.sizes, strict=True))
    head += [f"MESH = {{{sizes}}}", *settings, "", ""]
    return "\n".join(head) + "\n" + body + "\n"


def _imports(names: set[str]) -> list[str]:
    """Sorted as ruff's isort does: constants, classes, functions."""
    ordered = sorted(names, key=lambda n: (0 if n.isupper() else 1 if n[0].isupper() else 2, n))
    line = f"from autopar.runtime.program import {', '.join(ordered)}"
    if len(line) <= 100:
        return [line]
    return ["from autopar.runtime.program import (", *(f"    {n}," for n in ordered), ")"]


def _settings(lowered: Lowered, plan: Plan, captured: CapturedModel | None) -> list[str]:
    given = [f"zero={plan.zero}", f"microbatches={plan.microbatches}"]
    given += [f'precision="{plan.precision}"', f'recompute="{plan.recompute}"']
    units = _units(lowered)
    given.append(f"units={literal(units)}")
    if captured is not None:
        whole = tuple(e.name for e in captured.batch if e.batch_dim is None)
        if whole:
            given.append(f"whole_inputs={literal(whole)}")
    lines = Lines(0)
    lines.add(f"SETTINGS = Settings({', '.join(given)})")
    return lines.lines


def _units(lowered: Lowered) -> tuple[str, ...]:
    """Patterns of the repeated blocks: their parameters travel together.

    ``head.*`` stands for a list of which every member repeats; otherwise members are named.
    """
    instances = {i for block in lowered.graph.blocks.values() for i in block.units}
    members: dict[str, set[str]] = {}
    for name, _ in lowered.graph.parameters():
        parts = name.split(".")
        for i in range(1, len(parts)):
            members.setdefault(".".join(parts[:i]), set()).add(".".join(parts[: i + 1]))
    found = []
    for block in lowered.graph.blocks.values():
        for instance in block.units:
            head, _, last = instance.rpartition(".")
            every = last.isdigit() and head and members.get(head, set()) <= instances
            found.append(f"{head}.*" if every else instance)
    return tuple(dict.fromkeys(found))


def _docstring(lowered: Lowered, plan: Plan, captured: CapturedModel | None, body: str) -> str:
    stage = plan.stages[0]
    ranks = stage.mesh.device_count
    size = lowered.mesh.size(MICROBATCH)
    micro = "1 microbatch" if size == 1 else f"{size} microbatches"
    samples = "" if captured is None else f"{captured.samples} samples in "
    model = plan.workload.rpartition("/")[2]
    lines = [
        f'"""{model} on {ranks} rank{"s" if ranks != 1 else ""}: {stage.mesh}.',
        "",
        f"Batch:     {samples}{micro}; shapes below are those of one microbatch on one rank.",
        "State:     " + f"\n{'':11}".join(state(plan)),
        f"Precision: {plan.precision}.",
        "",
        "A comment gives a result's local shape, and how the model axes hold it where it is not",
        "whole on every rank. Collectives are the calls that name an axis.",
        "",
        *legend(body, lowered),
        "",
        "The decisions stand in ../plan.json. To run it:",
        "",
        "    autopar run <the folder of plan.json>",
        '"""',
    ]
    return "\n".join(lines)
