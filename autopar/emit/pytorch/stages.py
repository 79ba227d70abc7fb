"""The stages of a pipeline: a class for every kind of them, what travels, and who runs what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from textwrap import wrap

from autopar.emit.constants import literal
from autopar.emit.names import first_free
from autopar.emit.pytorch.classes import Printing, module_tree
from autopar.emit.pytorch.contents import contents, whole_modules
from autopar.emit.pytorch.original import CapturedModel
from autopar.emit.pytorch.precision import wide_values
from autopar.emit.pytorch.signatures import argument_names
from autopar.emit.pytorch.top import batch_names, documented, top_class
from autopar.emit.pytorch.widths import changed
from autopar.emit.roles import Known
from autopar.emit.sizes import Sizes
from autopar.emit.text import COLUMNS, Lines
from autopar.lowering.counts import counted
from autopar.lowering.lowered import Lowered
from autopar.lowering.scopes import scopes
from autopar.lowering.stages import StagePart
from autopar.nouns.plan import Plan
from autopar.pipeline.schedules.of_plan import schedule_of

LOSS = "loss"
"""The name under which the runtime knows the loss of a stage."""
SPELLED = 4
"""Stages of one class whose modules are listed."""
_LAYERS = re.compile(r"(?<=for i in )range\(\d+, \d+\)(?=}\))")
_ATTRIBUTE = re.compile(r"\bself\.(\w+)")
_LAYER = re.compile(r'(?<=[{\[])"\d+"(?=: |\])')


def stage_classes(
    parts: Sequence[StagePart],
    cut: Sequence[StagePart],
    model: Lowered,
    plan: Plan,
    captured: CapturedModel | None,
    printing: Printing,
    classes: Mapping[str, str],
) -> str:
    """The classes, then ``VALUES`` and ``STAGES``.

    cut:     ``parts`` before ops were rewritten for printing, of ``model``.
    classes: of every block instance, by path.
    """
    (loss,) = parts[-1].lowered.graph.outputs[-1:]
    schedule = schedule_of(plan)
    whole = [whole_modules(part.lowered, model) for part in cut]
    made = _joined(
        [
            _class(
                part, modules, loss, captured, replace(printing, recompute=own.recompute), classes
            )
            for part, modules, own in zip(parts, whole, plan.stages, strict=True)
        ]
    )
    alike: dict[str, list[int]] = {}  # the parts of each class
    for number, (text, _) in enumerate(made):
        alike.setdefault(text, []).append(number)
    calls = [""] * len(parts)
    body = []
    for text, numbers in alike.items():
        stages = [n for n in range(len(schedule.ranks)) if schedule.part[n] in numbers]
        name = first_free([_class_name(stages)], printing.library.texts)
        for number in numbers:
            given = made[number][1]
            calls[number] = f"lambda: {name}({given})" if given else name
        held = [(n, contents(cut[schedule.part[n]].lowered, model)) for n in stages]
        if loss in parts[numbers[-1]].gives:
            held = [(n, [*modules, "the loss"]) for n, modules in held]
        about = _about([(n, schedule.ranks[n], modules) for n, modules in held])
        body.append(f"class {name}{documented(text, about)}")
    return "\n\n\n".join([*body, _tables(parts, plan, calls, loss, printing.sizes)])


def _class_name(stages: Sequence[int]) -> str:
    """``Stage2``, ``Stages1To6``, ``Stages0And7``."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and runs[-1][-1] + 1 == stage:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    texts = [f"{run[0]}To{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"Stage{'s' * (len(stages) > 1)}{'And'.join(texts)}"


def _about(stages: Sequence[tuple[int, int, list[str]]]) -> list[str]:
    """The docstring of the class of stages, each with its rank and its modules."""
    if len(stages) > SPELLED:
        return ["Stages with layers of their own, see STAGES."]
    lines = []
    for number, rank, modules in stages:
        held = f": {', '.join(modules)}" if modules else ""
        text = f"Stage {number} on rank {rank}{held}."
        lines += wrap(text, COLUMNS - 8, subsequent_indent=" " * 4)
    return lines


def _class(
    part: StagePart,
    whole: Container[str],
    loss: str,
    captured: CapturedModel | None,
    printing: Printing,
    classes: Mapping[str, str],
) -> str:
    """A stage's class from its bases on."""
    lowered = part.lowered
    own = replace(
        printing,
        wide={**printing.wide, "": wide_values(lowered, printing.half)} if printing.half else {},
        returned={name: paths for name, paths in printing.returned.items() if name},
        known={name: known for name, known in printing.known.items() if name},
    )
    here = {i: classes[i] for block in lowered.graph.blocks.values() for i in block.instances}
    scope = scopes(lowered, whole)
    root = module_tree(scope, lowered, "", own, here)
    entries = [n for n in lowered.graph.inputs if n not in part.takes]
    batch = batch_names(entries)
    streams = argument_names(scope, lowered, part.takes, Known.of(lowered))
    free = [first_free([name], batch.values()) for name in streams]
    names = {**batch, **dict(zip(part.takes, free, strict=True))}
    return top_class(lowered, scope, root, captured, own, names, loss)


def _joined(texts: Sequence[str]) -> list[tuple[str, str]]:
    """The classes, and what each is given: several that differ in their layers alone are one."""
    general = [_of_layers(text) for text in texts]
    often = Counter(text for text, _ in general)
    return [
        made if often[made[0]] > 1 else (text, "")
        for text, made in zip(texts, general, strict=True)
    ]


def _of_layers(text: str) -> tuple[str, str]:
    """A class that is told its run of layers, or its one layer, and what ``text`` has there."""
    head = "def __init__(self)"
    runs, alone = _LAYERS.findall(text), _LAYER.findall(text)
    if len(runs) == 1 and not alone:
        made = _LAYERS.sub("layers", text)
        return made.replace(head, "def __init__(self, layers: range)"), f"layers={runs[0]}"
    if runs or len({*alone}) != 1:
        return text, ""
    name = first_free(("layer", "number"), _ATTRIBUTE.findall(text))
    made = changed(text, lambda statement: _LAYER.sub(f"self.{name}", statement))
    made = _LAYER.sub(f"self.{name}", made).replace(head, f"def __init__(self, {name}: str)")
    init = "super().__init__()\n"
    made = made.replace(init, f"{init}{' ' * 8}self.{name} = {name}\n", 1)
    fits = all(len(line) <= COLUMNS for line in made.split("\n"))
    return (made, f"{name}={alone[0]}") if fits else (text, "")


def _tables(
    parts: Sequence[StagePart], plan: Plan, made: Sequence[str], loss: str, sizes: Sizes
) -> str:
    schedule = schedule_of(plan)
    values, stages = Lines(4), Lines(4)
    for n, rank in enumerate(schedule.ranks):
        number = schedule.part[n]
        part, stage, lowered = parts[number], plan.stages[number], parts[number].lowered
        again = " again" * (n != number)  # a second pipeline through the same parts
        for name in (name for name in part.gives if name != loss):
            tensor = lowered.tensors[name].tensor
            arguments = [literal(sizes.local(lowered, name, lowered.tensors[name].shared))]
            if tensor.dtype != "float32" or not tensor.differentiable:
                arguments.append(literal(tensor.dtype))
            if not tensor.differentiable:
                arguments.append("gradient=False")
            values.add(f"{literal(name + again)}: Value({', '.join(arguments)}),")
        takes = [name + again * (name in part.takes) for name in lowered.graph.inputs]
        if counted(lowered):
            takes.append("counts")
        gives = [LOSS if name == loss else name + again for name in part.gives]
        arguments = [made[number], f"rank={rank}"]
        arguments += [f"takes={literal(tuple(takes))}", f"gives={literal(tuple(gives))}"]
        if len({(s.zero, s.recompute) for s in plan.stages}) > 1:
            arguments += [f"zero={stage.zero}", f"recompute={literal(str(stage.recompute))}"]
        stages.add(f"Stage({', '.join(arguments)}),")
    tables = ["VALUES = {", *values.lines, "}", "STAGES = (", *stages.lines, ")"]
    return "\n".join(tables)


__all__ = ["LOSS", "stage_classes"]
