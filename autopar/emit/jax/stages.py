"""The stages of a pipeline in ``model.py``: a function for each kind of them, and their tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.emit.constants import holding, literal
from autopar.emit.jax.batch import output_kinds
from autopar.emit.jax.functions import body
from autopar.emit.jax.loops import last_alone, last_stack
from autopar.emit.jax.printing import Printing
from autopar.emit.jax.shapes import shown, signature
from autopar.emit.names import first_free, is_attribute
from autopar.emit.roles import Known, roles
from autopar.emit.text import Lines, tuple_text
from autopar.lowering.lowered import Lowered
from autopar.lowering.stages import StagePart
from autopar.nouns.plan import Plan
from autopar.pipeline.actions import Schedule
from autopar.pipeline.schedules.of_plan import schedule_of

LOSS = "loss"
"""The name under which the runtime knows the loss of a stage."""
AGAIN = " again"
"""Behind names of values and outputs in a second pipeline through the same parts; the runtime knows
it, too."""
PARAMETERS = "params"


def stage_functions(
    parts: Sequence[StagePart], plan: Plan, whole: Lowered, printing: Printing
) -> tuple[list[str], list[str]]:
    """The functions, one for all stages that run the same; and the lines of ``VALUES``, ``STAGES``
    and ``OUTPUTS``."""
    schedule = schedule_of(plan)
    alike: dict[Body, list[int]] = {}
    for number, part in enumerate(parts):
        alike.setdefault(_body(part, printing, whole.outputs[0].name), []).append(number)
    names: dict[int, str] = {}
    functions = []
    for made, numbers in alike.items():
        stages = [n for n in range(len(schedule.ranks)) if schedule.part[n] in numbers]
        name = first_free([_name(stages)], printing.reserved)
        names.update(dict.fromkeys(numbers, name))
        functions.append(made.text(name, stages, schedule))
    tables = _values(parts, schedule, printing)
    tables += _stages(parts, plan, schedule, names, whole.outputs[0].name)
    return functions, [*tables, *_outputs(whole)]


@dataclass(frozen=True, slots=True)
class Body:
    """A stage's function without its name: stages that run the same have one."""

    arguments: tuple[str, ...]
    results: int
    about: str
    lines: tuple[str, ...]

    def text(self, name: str, stages: Sequence[int], schedule: Schedule) -> str:
        """The function, of ``stages``."""
        where = sorted({schedule.ranks[n] for n in stages})
        which = f"Stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        place = f"place{'s' * (len(where) > 1)} {', '.join(map(str, where))}"
        doc = Lines(4)
        doc.document([f"{which} on {place} of pp.", "", self.about])
        head = signature(name, self.arguments, self.results)
        return "\n".join(line.rstrip() for line in (*head, *doc.lines, *self.lines))


def _name(stages: Sequence[int]) -> str:
    """``stage_2``, ``stages_1_to_6``, ``stages_0_and_7``."""
    if len(stages) == 1:
        return f"stage_{stages[0]}"
    if list(stages) == list(range(stages[0], stages[-1] + 1)):
        return f"stages_{stages[0]}_to_{stages[-1]}"
    return f"stages_{'_and_'.join(map(str, stages))}"


def _named(part: StagePart, printing: Printing) -> Printing:
    """What a stage takes of other stages is called as its readers see it, else ``x``."""
    known = Known.of(part.lowered)
    names: dict[str, str] = {}
    seen = roles(part.lowered)
    for name in part.takes:
        hint = seen.get(name) or known.assigned.get(name, "")
        own = hint if hint and is_attribute(hint) else "x"
        names[name] = first_free([own], (*names.values(), *part.lowered.graph.inputs, PARAMETERS))
    return replace(printing, arguments={**printing.arguments, "": names})


def _body(part: StagePart, printing: Printing, loss: str) -> Body:
    lowered = part.lowered
    arguments, lines = body(lowered, PARAMETERS, _named(part, printing), loss)
    stacks = " | Stack" if lowered.blocks else ""
    typed = [f"{PARAMETERS}: dict[str, Array{stacks}]", *(f"{name}: Array" for name in arguments)]
    given = [
        f"{variable} {shown(lowered.graph.tensors[n], lowered.tensors[n].produced, lowered)}"
        for variable, n in zip(arguments, lowered.graph.inputs, strict=True)
    ]
    gives = [shown(lowered.graph.tensors[o.name], o.wanted, lowered) for o in lowered.outputs]
    about = f"{', '.join(given)} -> {', '.join(gives)}"
    return Body(tuple(typed), len(lowered.outputs), about, tuple(lines))


def _values(parts: Sequence[StagePart], schedule: Schedule, printing: Printing) -> list[str]:
    lines = Lines(4)
    taken = {name for part in parts for name in part.takes}
    for n in range(len(schedule.ranks)):
        part = parts[schedule.part[n]]
        lowered = part.lowered
        for name in (name for name in part.gives if name in taken):
            tensor = lowered.tensors[name].tensor
            shape = printing.sizes.local(lowered, name, lowered.tensors[name].shared)
            more = {
                f'dtype="{tensor.dtype}"': tensor.dtype != "float32",
                "gradient=False": not tensor.differentiable,
            }
            given = ", ".join([literal(shape), *holding(more)])
            lines.add(f"{literal(name + _again(n, schedule))}: Value({given}),")
    note = "# what travels between stages: the piece of one device, of one microbatch"
    return [note, "VALUES = {", *lines.lines, "}"]


def _outputs(whole: Lowered) -> list[str]:
    """How data axes and microbatches hold what the loss function returns beside the loss."""
    kinds = output_kinds(whole)
    if not kinds:
        return []
    about = "# what is returned beside the loss: split along a dim, or shares to add up"
    rows = [f"    {literal(name)}: {kind}," for name, kind in kinds.items()]
    return [about, "OUTPUTS = {", *rows, "}"]


def _again(stage: int, schedule: Schedule) -> str:
    """Behind names in a second pipeline through the same parts."""
    return AGAIN * (stage != schedule.part[stage])


def _stages(
    parts: Sequence[StagePart],
    plan: Plan,
    schedule: Schedule,
    names: Mapping[int, str],
    loss: str,
) -> list[str]:
    lines = Lines(4)
    for n, rank in enumerate(schedule.ranks):
        number = schedule.part[n]
        part, own, again = parts[number], plan.stages[number], _again(n, schedule)
        takes = tuple(name + again * (name in part.takes) for name in part.lowered.graph.inputs)
        gives = tuple(LOSS if name == loss else name + again for name in part.gives)
        held = tuple(_parameters(part.lowered))
        arguments = [names[number], f"rank={rank}"]
        arguments += [f"takes={literal(takes)}", f"gives={literal(gives)}"]
        arguments += [f"parameters={literal(held)}"] * bool(held)
        layers = _layers(part.lowered)
        arguments += [f"layers={{{', '.join(layers)}}}"] * bool(layers)
        if len({stage.recompute for stage in plan.stages}) > 1:
            arguments.append(f"recompute={literal(str(own.recompute))}")
        lines.add(f"Stage({', '.join(arguments)}),")
    return ["STAGES = (", *lines.lines, ")"]


def _parameters(lowered: Lowered) -> list[str]:
    tensors = lowered.tensors.items()
    return [name for name, value in tensors if value.tensor.role in ("parameter", "buffer")]


def _layers(lowered: Lowered) -> list[str]:
    """``"h": tuple(f"h.{i}" for i in range(2, 4))`` of each block."""
    apart = last_alone(lowered)
    made = []
    for name in lowered.blocks:
        instances = tuple(dict.fromkeys(lowered.graph.blocks[name].instances))
        layers = instances[:-1] if name in apart else instances
        made.append(f"{literal(name)}: {instances_text(layers)}")
        if name in apart:
            made.append(f"{literal(last_stack(name))}: ({literal(instances[-1])},)")
    return made


def instances_text(names: tuple[str, ...]) -> str:
    """``tuple(f"blocks.{i}" for i in range(4))``, or the names one by one."""
    prefix, _, first = names[0].rpartition(".")
    plain = re.fullmatch(r"[\w.]*", prefix) and first.isascii()  # what an f-string has as it is
    if plain and first.isdecimal():
        start, stop = int(first), int(first) + len(names)
        if len(names) > 2 and list(names) == [f"{prefix}.{i}" for i in range(start, stop)]:
            span = f"{start}, {stop}" if start else f"{stop}"
            return f'tuple(f"{prefix}.{{i}}" for i in range({span}))'
    return tuple_text(names)


__all__ = ["LOSS", "instances_text", "stage_functions"]
