"""What a reader of a plan might take for granted and should not: sentences for the summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import first_of
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.layout import divisors
from autopar.nouns.plan import Plan, key
from autopar.nouns.text.cluster import devices_text, ranks_text
from autopar.planner.advice.fewer import Fewer
from autopar.report.narrow import narrow_notes
from autopar.report.units import count, duration, size
from autopar.rules.work import PRODUCTS

LOST_BITS = {"bfloat16": 8, "float16": 11}
"""Half of the last place of 1 is two to the minus this."""
NAMED = 3
"""How many names stand in a sentence before "and N more"."""


def notes(
    lowered: Lowered,
    plan: Plan,
    cluster: Cluster,
    samples: int,
    obstacles: Sequence[str] = (),
    fewer: Fewer | None = None,
) -> list[str]:
    """Sentences on what stays whole or is cut unevenly, on the batch, on layers in 8 bits, on
    parameters that are trained in half precision, and on mixed devices.

    samples:   size of the global batch.
    obstacles: what stands against data ranks or microbatches; layouts that were left out.
    fewer:     a part of the cluster that would be as fast.
    """
    lines = [_enough(fewer, plan, cluster)] if fewer is not None else []
    for axis in lowered.mesh.model_axes:
        lines += [*_whole(lowered, axis), *_uneven(lowered, axis)]
    lines += [*_batch(plan.device_count, samples), *obstacles]
    lines += narrow_notes(lowered, plan, cluster)
    return [*lines, *_narrow(lowered, plan), *_mixed(plan, cluster)]


def _enough(fewer: Fewer, plan: Plan, cluster: Cluster) -> str:
    devices = f"{fewer.devices} {cluster.device.name}"
    part = f"{devices} joined by {fewer.domain}" if fewer.domain else f"{devices} alone"
    return (
        f"{part} would take {duration(fewer.step_time_s)} a step, these {plan.device_count} take "
        f"{duration(plan.prediction.step_time_s)}. Plan with a cluster file of count "
        f"{fewer.devices}, or give the devices more to do, such as a larger batch."
    )


def _whole(lowered: Lowered, axis: str) -> Iterator[str]:
    products = [
        (name, op.bound is not None and op.strategy.on(axis) in op.bound.factors)
        for name, op in _ops(lowered)
        if op.bound is not None and op.bound.rule.cost in PRODUCTS
    ]
    left = [name for name, is_split in products if not is_split]
    if left:
        named = first_of(left, NAMED)
        yield f"{axis} leaves {len(left)} of {len(products)} products whole: {named}."
    stored = list(_parameters(lowered, axis))
    whole = sorted((-held, name) for name, held, is_split in stored if not is_split)
    if whole:
        held = sum(-least for least, _ in whole)
        yield (
            f"Every {axis} rank holds {len(whole)} of {len(stored)} kinds of parameters whole, "
            f"{size(held)}, largest first: {first_of((name for _, name in whole), NAMED)}."
        )


def _uneven(lowered: Lowered, axis: str) -> Iterator[str]:
    """Indices whose pieces differ in size, one sentence for each size."""
    ways = lowered.mesh.size(axis)
    groups: dict[int, list[str]] = {}
    for name, op in _ops(lowered):
        assert op.bound is not None
        factor = op.bound.factors.get(op.strategy.on(axis))
        if factor is not None and factor.size % ways:
            groups.setdefault(factor.size, []).append(name)
    for extent, names in groups.items():
        cut = f"{extent} is cut unevenly over {axis} {ways}, {_pieces(extent, ways)}"
        yield f"{cut}: {first_of(names, NAMED)}."


def _pieces(extent: int, ways: int) -> str:
    """``3 x 12565 + 12562``: what ranks get, as `torch.chunk` cuts."""
    most = -(-extent // ways)
    full, rest = divmod(extent, most)
    idle = ways - full - (rest > 0)
    parts = [f"{full} x {most}" if full > 1 else str(most)]
    parts += [str(rest)] * (rest > 0) + [f"{idle} x nothing" if idle > 1 else "nothing"] * (
        idle > 0
    )
    return " + ".join(parts)


def _batch(devices: int, samples: int) -> Iterator[str]:
    out = [ranks for ranks in divisors(devices) if samples % ranks]
    if out:
        yield (
            f"The batch of {samples} samples rules out {_listed(out)} data ranks, which do not "
            f"divide it; a multiple of {devices} would allow every number."
        )


def _narrow(lowered: Lowered, plan: Plan) -> Iterator[str]:
    """Parameters that are trained in half precision, one sentence for each dtype."""
    trained: dict[str, int] = {}
    for body in (*lowered.blocks.values(), lowered):
        for tensor in (value.tensor for value in body.tensors.values()):
            if tensor.role == "parameter" and tensor.differentiable:
                held = tensor.numel * _copies(lowered, body.block)
                trained[tensor.dtype] = trained.get(tensor.dtype, 0) + held
    now = sum(DTYPE_BYTES[dtype] * held for dtype, held in trained.items())
    memory = plan.prediction.memory_bytes
    state_bytes = memory.parameters + memory.gradients + memory.optimizer
    for dtype, bits in LOST_BITS.items():
        held = trained.get(dtype, 0)
        if not held:
            continue
        wider = 1 + held * (DTYPE_BYTES["float32"] - DTYPE_BYTES[dtype]) / now
        kept = "gradients" if plan.optimizer == "sgd" else "gradients and optimizer state"
        yield (
            f"{count(held)} of {count(sum(trained.values()))} trained parameters are {dtype}, and "
            f"so are their {kept} and every update: one smaller than 2^-{bits} of a parameter's "
            "value is rounded away, so training may stall. To keep float32 ones, leave the "
            f'parameters in float32 and say precision="{dtype}": products are still in {dtype}; '
            f"parameters, gradients and optimizer state of a device take about "
            f"{size(wider * state_bytes)} then, {size(state_bytes)} now."
        )


def _mixed(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """What devices that differ have to do, and which have nothing."""
    if cluster.idle:
        yield (
            f"{devices_text(cluster.idle)} stay idle: no plan that uses them too came out as fast. "
            "Plans that lost say what some would take."
        )
    if len(cluster.kinds) == 1:
        return
    yield f"Devices differ; start the processes in this order: {ranks_text(cluster)}."
    each = plan.device_count // len(plan.groups)
    views = [cluster.alike(first, each) for first in plan.groups]
    pace = {view: [i for i, other in enumerate(views) if other == view] for view in views}
    for view, ranks in pace.items():
        inside = {cluster.device_at(i * each + place).name for i in ranks for place in range(each)}
        if len(inside) > 1:
            where = f"Pipeline ranks {_listed(ranks)} have" if len(views) > 1 else "The plan has"
            yield (
                f"{where} {' and '.join(sorted(inside))} beside one another with equal shares: all "
                f"are priced as {view.device.name} with {size(view.device.memory_bytes)}, the "
                "slowest kind with the least of each figure."
            )


def _ops(lowered: Lowered) -> Iterator[tuple[str, LoweredOp]]:
    for body in (*lowered.blocks.values(), lowered):
        for op in body.ops:
            if op.bound is not None:
                yield key(body.block, op.op.name), op


def _parameters(lowered: Lowered, axis: str) -> Iterator[tuple[str, int, bool]]:
    """(key, bytes of all its copies, whether the axis splits it)"""
    for body in (*lowered.blocks.values(), lowered):
        block, copies = body.block, _copies(lowered, body.block)
        for name, value in body.tensors.items():
            if value.tensor.role == "parameter":
                is_split = value.produced.on(axis).kind == "S"
                yield key(block, name), value.tensor.size_bytes * copies, is_split


def _copies(lowered: Lowered, block: str | None) -> int:
    """How many sets of its parameters a block has."""
    return 1 if block is None else len(dict.fromkeys(lowered.graph.blocks[block].instances))


def _listed(numbers: Sequence[int]) -> str:
    """``4, 8 and 16``"""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
