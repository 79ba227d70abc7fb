"""Every collective of a training step that a plan implies, as ``collectives.json`` lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.lowering import BATCH_AXES, Lowered, activation_collectives
from autopar.nouns.graph import Graph
from autopar.nouns.plan import Plan
from autopar.nouns.sharding import Sharding
from autopar.state_collectives import Stored, state_collectives


@dataclass(frozen=True, slots=True)
class Row:
    """``count`` collectives of one size in a step; see `autopar.runtime.counting`."""

    kind: str
    axis: str
    size_bytes: int
    count: int
    what: str


def priced_collectives(
    lowered: Lowered, plan: Plan, stored_dtypes: Mapping[str, str], clips: bool
) -> list[Row]:
    """Activations, parameters, gradients and bookkeeping; sorted, equal rows added up.

    ``stored_dtypes``: the dtype in which each parameter is stored, by full name.
    """
    found: Counter[tuple[str, str, int, str]] = Counter()
    for priced in activation_collectives(lowered, plan.recompute):
        moved = priced.collective
        what = f"{priced.key} {priced.direction}"
        found[moved.kind, moved.axis, moved.size_bytes, what] += priced.count
    state = state_collectives(
        stored_parameters(lowered, stored_dtypes),
        plan.stages[0].mesh,
        plan.zero,
        plan.microbatches,
        plan.precision,
        clips,
        global_counts(lowered.graph),
        plan.framework,
    )
    for entry in state:
        moved = entry.collective
        found[moved.kind, moved.axis, moved.size_bytes, entry.what] += entry.count
    return [
        Row(kind, axis, size, count, what)
        for (kind, axis, size, what), count in sorted(found.items())
    ]


def stored_parameters(lowered: Lowered, dtypes: Mapping[str, str]) -> Iterator[Stored]:
    """Each parameter of the unfolded model once, with its unit."""
    yield from _stored(lowered, dtypes, "", "")
    for name, body in lowered.blocks.items():
        block = lowered.graph.blocks[name]
        for instance in dict.fromkeys(block.instances):
            unit = instance if instance in block.units else ""
            yield from _stored(body, dtypes, f"{instance}.", unit)


def _stored(
    lowered: Lowered, dtypes: Mapping[str, str], prefix: str, unit: str
) -> Iterator[Stored]:
    for name, found in lowered.tensors.items():
        if found.tensor.role != "parameter":
            continue
        model = tuple((a, p) for a, p in found.produced.placements if a not in BATCH_AXES)
        yield Stored(
            name=prefix + name,
            shape=found.tensor.shape,
            dtype=dtypes.get(prefix + name, found.tensor.dtype),
            sharding=Sharding(model),
            trainable=found.tensor.differentiable,
            unit=unit,
        )


def global_counts(graph: Graph) -> int:
    """Losses that are means over the labelled tokens of the batch: each asks for one count."""
    bodies = [block.body for block in graph.blocks.values()]
    return sum(
        op.kind == "cross_entropy"
        and op.attrs.get("reduction", "mean") == "mean"
        and op.attrs.get("ignore_index", -100) is not None  # else every row counts, by its shape
        for part in (graph, *bodies)
        for op in part.ops
    )
