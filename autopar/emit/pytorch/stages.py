"""The stages of a pipeline: a class for every kind of them, what travels, and who runs what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.emit.names import first_free
from autopar.emit.pytorch.classes import Printing, argument_names, module_tree
from autopar.emit.pytorch.counts import counted
from autopar.emit.pytorch.original import CapturedModel
from autopar.emit.pytorch.precision import wide_values
from autopar.emit.pytorch.scopes import scopes
from autopar.emit.pytorch.top import batch_names, top_class
from autopar.emit.sizes import Sizes
from autopar.emit.text import COLUMNS, Lines, literal
from autopar.lowering.stages import StagePart
from autopar.nouns.plan import Plan
from autopar.pipeline.of_plan import schedule_of

LOSS = "loss"
"""The name under which the runtime knows the loss of a stage."""
ACTIONS = "# What each pipeline rank does in turn: stage, forward or backward, microbatch"
_LAYERS = re.compile(r"(?<=for i in )range\(\d+, \d+\)(?=}\))")


def stage_classes(
    parts: Sequence[StagePart],
    plan: Plan,
    captured: CapturedModel | None,
    printing: Printing,
    classes: Mapping[str, str],
) -> str:
    """The classes, then ``VALUES``, ``STAGES`` and, as a comment, what each rank does in order.

    classes: of every block instance, by path.
    """
    (loss,) = parts[-1].lowered.graph.outputs[-1:]
    texts: dict[str, str] = {}
    made = []
    for number, part in enumerate(parts):
        ending = "First" if number == 0 else "Last" if number == len(parts) - 1 else "Middle"
        text, layers = _class(part, loss, captured, printing, classes)
        name = next((n for n, known in texts.items() if known == text), "")
        if not name:
            name = first_free([ending], [*texts, *printing.library.texts])
            texts[name] = text
        made.append(f"lambda: {name}({layers})" if layers else name)
    body = [f"class {name}{text}" for name, text in texts.items()]
    return "\n\n\n".join([*body, _tables(parts, plan, made, loss, printing.sizes)])


def _class(
    part: StagePart,
    loss: str,
    captured: CapturedModel | None,
    printing: Printing,
    classes: Mapping[str, str],
) -> tuple[str, str]:
    """A stage's class from its bases on, and which layers it is of where it has to be told."""
    lowered = part.lowered
    own = replace(
        printing,
        wide={**printing.wide, "": wide_values(lowered, printing.half)} if printing.half else {},
        returned={name: paths for name, paths in printing.returned.items() if name},
        known={name: known for name, known in printing.known.items() if name},
    )
    here = {i: classes[i] for block in lowered.graph.blocks.values() for i in block.instances}
    scope = scopes(lowered, calls=False)
    root = module_tree(scope, lowered, "", own, here)
    entries = [n for n in lowered.graph.inputs if n not in part.takes]
    batch = batch_names(entries)
    streams = argument_names(scope, lowered, part.takes)
    free = [first_free([name], batch.values()) for name in streams]
    names = {**batch, **dict(zip(part.takes, free, strict=True))}
    about = "One stage on one rank; see the top of this file."
    text = top_class(lowered, scope, root, captured, own, names, loss, about)
    layers = _LAYERS.findall(text)
    if len(layers) != 1:
        return text, ""
    general = _LAYERS.sub("layers", text)
    return general.replace("def __init__(self)", "def __init__(self, layers: range)"), layers[0]


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
            arguments += [f"zero={stage.zero}", f"recompute={literal(stage.recompute)}"]
        stages.add(f"Stage({', '.join(arguments)}),")
    order = [_shortened(f"# rank {i}: ", map(str, a)) for i, a in enumerate(schedule.lists)]
    tables = ["VALUES = {", *values.lines, "}", ACTIONS, *order, "STAGES = (", *stages.lines, ")"]
    return "\n".join(tables)


def _shortened(head: str, actions: Iterable[str]) -> str:
    """As many actions as a line holds."""
    for action in actions:
        if len(head) + len(action) > COLUMNS - 4:
            return f"{head}..."
        head += f"{action} "
    return head.rstrip()


__all__ = ["LOSS", "stage_classes"]
