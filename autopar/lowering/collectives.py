"""Every collective of a training step that a plan implies, as ``collectives.json`` lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autopar.lowering.counts import global_counts, label_collectives
from autopar.lowering.issued import activation_collectives
from autopar.lowering.lowered import Lowered, stored
from autopar.lowering.read_again import gathered_back
from autopar.lowering.stages import StagePart, stage_parts
from autopar.lowering.state import (
    Stored,
    TwoLevel,
    cutting_axes,
    is_wide,
    loss_bytes_of,
    piece_bytes,
    pipeline_loss_bytes,
    state_collectives,
    sums,
)
from autopar.nouns.axes import BATCH, PIPELINE
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.plan import Plan
from autopar.nouns.prefetch import USUAL
from autopar.nouns.recompute import Recompute
from autopar.nouns.reduction import ranks_inside
from autopar.nouns.scatters import in_turn
from autopar.nouns.zero import ZERO
from autopar.pipeline.actions import Schedule
from autopar.pipeline.schedules.of_plan import schedule_of
from autopar.rules.narrow_gathers import names_of_narrow


@dataclass(frozen=True, slots=True)
class Row:
    """``count`` collectives of one size in a step; ``what`` is for readers.

    ``size_bytes`` is the full-size side on rank 0, as in `autopar.rules.resharding.Collective`; a
    group over several axes is written ``"dp_replicate+dp_shard"``, outermost first. ``rank``: on
    which place of ``pp``.
    """

    kind: str
    axis: str
    size_bytes: int
    count: int
    what: str = ""
    rank: int = 0


def priced_collectives(
    lowered: Lowered,
    plan: Plan,
    stored_dtypes: Mapping[str, str],
    clips: bool,
    library: str = "",
) -> list[Row]:
    """Activations, parameters, gradients and bookkeeping; sorted, equal rows added up.

    ``stored_dtypes``: the dtype in which each parameter is stored, by full name; ``library``: what
    issues collectives, as a level of a cluster names it.
    """
    if len(plan.stages) > 1:
        return _in_turn(pipeline_collectives(lowered, plan, stored_dtypes, clips), plan)
    counts: Counter[_Place] = Counter()
    (stage,) = plan.stages
    inside = ranks_inside(plan.all_reduce)
    _add_activations(counts, lowered, stage.recompute, plan.passes, plan.framework)
    state = state_collectives(
        stored_parameters(lowered, stored_dtypes, tells_units(plan), _narrow(lowered, plan)),
        plan.mesh(stage),
        stage.zero,
        plan.passes,
        plan.precision,
        clips,
        global_counts(lowered.graph),
        plan.framework,
        loss_bytes(lowered),
        plan.reduce_dtype,
        TwoLevel(inside, library == "gloo") if inside else None,
    )
    for entry in state:
        moved = entry.collective
        counts[moved.kind, moved.axis, moved.size_bytes, entry.what] += entry.count
    for axis, size in _beside_the_loss(lowered):
        counts["all_reduce", axis, size, "what is beside the loss"] += 1
    return _in_turn(_rows(counts, 0), plan)


def loss_bytes(lowered: Lowered) -> int:
    """Bytes in which the loss of a program is summed over data ranks."""
    outputs = lowered.outputs  # a stage that ends with a buffer has none
    return loss_bytes_of(lowered.graph.tensors[outputs[0].name].dtype if outputs else "float32")


def _beside_the_loss(lowered: Lowered) -> Iterator[tuple[str, int]]:
    """(axes, bytes) of what a JAX loss function returns more and every data rank has a share of:
    added up behind the step, in at least 32 bits. XLA joins that with the sum of the loss, so no
    time is priced for it."""
    for output in lowered.outputs[1:]:
        axes = [a for a in BATCH if output.wanted.on(a).kind == "P" and a in lowered.mesh.axes]
        tensor = lowered.graph.tensors[output.name]
        if axes:
            yield "+".join(axes), tensor.numel * max(4, DTYPE_BYTES[tensor.dtype])


_Place = tuple[str, str, int, str]


def _add_activations(
    counts: Counter[_Place], lowered: Lowered, recompute: Recompute, times: int, framework: str
) -> None:
    for priced in activation_collectives(lowered, recompute, times):
        moved = priced.collective
        what = f"{priced.key} {priced.direction}"
        counts[moved.kind, moved.axis, moved.size_bytes, what] += priced.count
    for name, moved in label_collectives(lowered) if framework == "torch" else ():
        counts[moved.kind, moved.axis, moved.size_bytes, f"{name} counted"] += times


def _rows(counts: Counter[_Place], rank: int) -> list[Row]:
    return [
        Row(kind, axis, size, count, what, rank)
        for (kind, axis, size, what), count in sorted(counts.items())
    ]


def _in_turn(rows: list[Row], plan: Plan) -> list[Row]:
    """With two reduce-scatters, or as many as axes, for one that the plan's programs do so."""
    sizes = dict(zip(plan.program_mesh.axes, plan.program_mesh.sizes, strict=True))
    turns: list[Row] = []
    for row in rows:
        first = plan.scatters.get(row.axis) if row.kind == "reduce_scatter" else None
        if first is None:
            turns.append(row)
            continue
        size_bytes = row.size_bytes
        for axis, ranks in in_turn(row.axis, first, sizes):
            turns.append(replace(row, axis=axis, size_bytes=size_bytes))
            size_bytes //= ranks
    return turns


def pipeline_collectives(
    lowered: Lowered, plan: Plan, stored_dtypes: Mapping[str, str], clips: bool
) -> list[Row]:
    """Of every pipeline rank: what its stages issue, what they send and receive, and sums of all.

    Norm and loss are summed over ``pp`` too; the gradients of a tie over the ranks that hold it.
    """
    schedule = schedule_of(plan)
    parts = stage_parts(lowered, plan.stages)
    run = Counter(schedule.route)
    passes = {s: run[i] for i, route in enumerate(schedule.routes) for s in route}
    narrow = _narrow(lowered, plan)
    stored = [
        list(stored_parameters(part.lowered, stored_dtypes, tells_units(plan), narrow))
        for part in parts
    ]
    if plan.framework == "jax":
        stored = [gathered_back(part.lowered, own) for part, own in zip(parts, stored, strict=True)]
    ranks = range(len(schedule.lists))
    counts: list[Counter[_Place]] = [Counter() for _ in ranks]
    for stage, rank in enumerate(schedule.ranks):
        number = schedule.part[stage]
        part, own, rows = parts[number], plan.stages[number], counts[rank]
        _add_activations(rows, part.lowered, own.recompute, passes[stage], plan.framework)
        for entry in state_collectives(
            stored[number],
            plan.mesh(own),
            own.zero,
            passes[stage],
            plan.precision,
            clips=False,
            counts=global_counts(part.lowered.graph),
            framework=plan.framework,
            loss_bytes=0,
            reduce_dtype=plan.reduce_dtype,
            staged=True,
        ):
            moved = entry.collective
            rows[moved.kind, moved.axis, moved.size_bytes, entry.what] += entry.count
    for way in ways(parts, schedule):
        for kind, rank, what in (("send", way.source, "sent"), ("recv", way.target, "received")):
            counts[rank][kind, PIPELINE, way.size_bytes, f"{way.name} {what}"] += passes[way.stage]
    _add_ties(counts, stored, plan, schedule)
    mesh = plan.program_mesh
    if plan.framework == "jax":
        _add_sums_of_stages(counts, parts, stored, plan, schedule, clips)
        return [row for rank in ranks for row in _rows(counts[rank], rank)]
    everything = [p for one in stored for p in one]
    zero = max(stage.zero for stage in plan.stages)
    cutting, wide = cutting_axes(everything, mesh, zero, plan.framework), is_wide(everything)
    for rank in ranks:
        scales, loss = plan.precision == "float16", pipeline_loss_bytes(wide, plan.precision)
        for entry in sums(mesh, cutting, clips, wide, scales, loss):
            moved = entry.collective
            counts[rank][moved.kind, moved.axis, moved.size_bytes, entry.what] += entry.count
    return [row for rank in ranks for row in _rows(counts[rank], rank)]


def _add_ties(
    counts: Sequence[Counter[_Place]],
    stored: Sequence[Sequence[Stored]],
    plan: Plan,
    schedule: Schedule,
) -> None:
    """Sums of the gradients of parameters that several ranks hold."""
    holders: dict[str, list[int]] = {}
    bytes_of: dict[str, int] = {}
    for stage, rank in enumerate(schedule.ranks):
        own = plan.stages[schedule.part[stage]]
        for p in (p for p in stored[schedule.part[stage]] if p.trainable):
            holders.setdefault(p.name, []).append(rank)
            bytes_of[p.name] = piece_bytes(p, plan.mesh(own), own.zero, plan.framework)
    for name, held in holders.items():
        places = sorted(set(held))
        if len(places) > 1:
            whole = len(places) == len(counts)
            axis = PIPELINE if whole else f"pp[{','.join(map(str, places))}]"
            for rank in places:
                counts[rank]["all_reduce", axis, bytes_of[name], f"{name} tie"] += 1


def _add_sums_of_stages(
    counts: Sequence[Counter[_Place]],
    parts: Sequence[StagePart],
    stored: Sequence[Sequence[Stored]],
    plan: Plan,
    schedule: Schedule,
    clips: bool,
) -> None:
    """Norm and loss of every stage by itself: one process adds up those of all stages (JAX)."""
    loss = parts[-1].lowered.graph.outputs[-1:]
    for stage, rank in enumerate(schedule.ranks):
        number = schedule.part[stage]
        own = plan.stages[number]
        mesh, held = plan.mesh(own).trimmed(), stored[number]
        cutting = cutting_axes(held, mesh, own.zero, plan.framework)
        size = loss_bytes(parts[number].lowered) if loss[0] in parts[number].gives else 0
        wide, scales = is_wide(held), plan.precision == "float16"
        for entry in sums(mesh, cutting, clips, wide, scales, size):
            moved = entry.collective
            counts[rank][moved.kind, moved.axis, moved.size_bytes, entry.what] += entry.count


@dataclass(frozen=True, slots=True)
class Way:
    """A tensor that each microbatch of ``stage`` sends from one pipeline rank to another."""

    name: str
    stage: int
    source: int
    target: int
    size_bytes: int


def ways(parts: Sequence[StagePart], schedule: Schedule) -> Iterator[Way]:
    """Values forward and their gradients back, between stages of different ranks."""
    for route in schedule.routes:
        for i, giver in enumerate(route):
            part = parts[schedule.part[giver]]
            for reader in route[i + 1 :]:
                source, target = schedule.ranks[giver], schedule.ranks[reader]
                if source == target:
                    continue
                takes = parts[schedule.part[reader]].takes
                for name in (n for n in part.gives if n in takes):
                    value = part.lowered.tensors[name]
                    size = part.lowered.local_bytes(name)
                    yield Way(name, giver, source, target, size)
                    if value.tensor.differentiable:
                        yield Way(f"d {name}", giver, target, source, size)


def _narrow(lowered: Lowered, plan: Plan) -> frozenset[str]:
    """The parameters that the plan gathers in 8 bits, by full name."""
    return frozenset() if plan.gather_dtype is None else names_of_narrow(lowered.graph)


def stored_parameters(
    lowered: Lowered,
    dtypes: Mapping[str, str],
    tells: bool = False,
    narrow: Set[str] = frozenset(),
) -> Iterator[Stored]:
    """Each parameter of the unfolded model once, with its unit. ``tells``: see `tells_units`;
    ``narrow``: full names of what is gathered in 8 bits."""
    yield from _stored(lowered, dtypes, "", "", narrow)
    again = gathered_again(lowered, by_itself=not tells)
    for name, body in lowered.blocks.items():
        block = lowered.graph.blocks[name]
        for instance in dict.fromkeys(block.instances):
            unit = instance if instance in block.units else ""
            for one in _stored(body, dtypes, f"{instance}.", unit, narrow):
                yield one if not unit or unit in again else replace(one, again=False)


def tells_units(plan: Plan) -> bool:
    """Whether the plan's program tells FSDP2 what to gather for backward, and does not leave that
    to it: at another depth than the usual one, and in pipelines, whose microbatches take turns."""
    if plan.prefetch not in (None, USUAL):
        return True
    staged = len(plan.stages) > 1 and plan.framework == "torch"
    return staged and any(ZERO[stage.zero].parameters for stage in plan.stages)


def gathered_again(lowered: Lowered, by_itself: bool) -> set[str]:
    """Units that FSDP2 gathers for backward too: those that have one, and ``by_itself`` what ran
    before such a one or before the root, which prefetches it without asking."""
    units = {unit for block in lowered.graph.blocks.values() for unit in block.units}
    again = units - {op.attrs["instance"] for op in lowered.graph.ops if op.kind == "block"}
    follows = True
    for op in reversed(lowered.graph.ops):
        if op.kind != "block" or op.attrs["instance"] not in units:
            continue
        passed = any(lowered.graph.tensors[name].differentiable for name in op.outputs)
        if passed or (follows and by_itself):
            again.add(op.attrs["instance"])
        follows = passed
    return again


def _stored(
    lowered: Lowered, dtypes: Mapping[str, str], prefix: str, unit: str, narrow: Set[str]
) -> Iterator[Stored]:
    read = (*(o for op in lowered.ops for o in op.operands), *lowered.outputs)
    graded = {operand.name for operand in read if operand.differentiable}
    for name, value in lowered.tensors.items():
        if value.tensor.role != "parameter":
            continue
        yield Stored(
            name=prefix + name,
            shape=value.tensor.shape,
            dtype=dtypes.get(prefix + name, value.tensor.dtype),
            sharding=stored(value.produced),
            trainable=value.tensor.differentiable,
            unit=unit,
            graded=name in graded,
            narrow=prefix + name in narrow,
        )
