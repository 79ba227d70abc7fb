"""Where a lowered graph may be cut into stages, and what stages of it send one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.lowering.lowered import Lowered
from autopar.lowering.stages import StagePart, Whole, parts_of, updated_buffers
from autopar.nouns.cluster import Cluster
from autopar.nouns.plan import Stage
from autopar.pricing.links import links
from autopar.pricing.runs import KEPT
from autopar.pricing.sends import Flow, Sends, flows

Signature = tuple[bool, bytes]
"""Whether a run starts the model, and the kinds of its units."""


@dataclass(slots=True)
class Cuts:
    """A lowered graph as units between which it may be cut: what no price changes. Parts are kept.

    units: first ops of the smallest parts that stages are made of.
    kinds: equal numbers for units of equal ops, equal resharding, and as far behind the unit that
           has the same parameters.
    ties:  (unit, the next one that calls the same instance of a block).
    """

    lowered: Lowered
    units: tuple[str, ...]
    kinds: tuple[int, ...]
    ties: tuple[tuple[int, int], ...] = ()
    flows: tuple[Flow, ...] = ()
    _parts: dict[tuple[int, int], StagePart] = field(default_factory=dict)
    _whole: Whole | None = None
    _kinds: bytes = b""
    _calls: dict[tuple[int, int], Mapping[str, int]] = field(default_factory=dict)
    _sends: dict[tuple[Cluster, int, int], Sends] = field(default_factory=dict)

    @staticmethod
    def of(lowered: Lowered) -> Cuts:
        units = cut_points(lowered)
        ties = _ties(lowered, units)
        return Cuts(lowered, units, _kinds(lowered, units, ties), ties, flows(lowered, units))

    def __post_init__(self) -> None:
        self._kinds = np.array(self.kinds, dtype=np.int32).tobytes()

    def sending(self, ways: int) -> Cuts:
        """The same where each rank sends one part in so many of what it has."""
        sent = tuple(Flow(f.size_bytes // ways, f.maker, f.readers) for f in self.flows)
        return replace(self, flows=sent, _sends={})

    def sends(self, cluster: Cluster, pp: int, apart: int) -> Sends:
        """Between stages of so many pipeline ranks, each so many devices from the next."""
        key = cluster, pp, apart
        if key not in self._sends:
            self._sends[key] = Sends(self.flows, len(self.units), links(cluster, pp, apart))
        return self._sends[key]

    def part(self, first: int, end: int) -> StagePart:
        """Units ``first`` to ``end - 1`` as a stage."""
        if (first, end) not in self._parts:
            starts = [i for i in (first, end) if 0 < i < len(self.units)]
            stages = [Stage(), *(Stage(first=self.units[i]) for i in starts)]
            if self._whole is None:
                self._whole = Whole.of(self.lowered)
            (self._parts[first, end],) = parts_of(self._whole, stages, [1 if first else 0])
        return self._parts[first, end]

    def calls(self, first: int, end: int) -> Mapping[str, int]:
        """How often a stage of these units calls each block."""
        if (first, end) not in self._calls:
            ops = self.part(first, end).lowered.ops
            blocks = Counter(op.op.attrs["block"] for op in ops if op.bound is None)
            self._calls[first, end] = blocks
        return self._calls[first, end]

    def signature(self, first: int, end: int) -> Signature:
        """Equal for stages that cost the same: calls of equal blocks with equal resharding."""
        return first == 0, self._kinds[4 * first : 4 * end]


def cut_points(lowered: Lowered) -> tuple[str, ...]:
    """First ops of the units: the graph's first, blocks, and ops with parameters.

    Every unit makes something that has a gradient: constants alone are no stage. A buffer that the
    forward updates is of one unit.
    """
    tensors = lowered.graph.tensors
    points = [lowered.ops[0].op.name]
    trains = False
    together = _together(lowered)
    for place, op in enumerate(lowered.ops):
        reads = any(tensors[n].role == "parameter" for n in op.op.inputs)
        flows = any(tensors[n].differentiable for n in op.op.outputs)
        cuts = not any(first < place <= last for first, last in together)
        if cuts and trains and flows and (op.op.kind == "block" or reads):
            points.append(op.op.name)
        trains = trains or flows
    return tuple(points)


def _together(lowered: Lowered) -> list[tuple[int, int]]:
    """First and last op that read a buffer which the forward updates, where they are several; a
    layer that updates its own may be called several times."""
    places: dict[str, list[int]] = {}
    updated = updated_buffers(op.op for op in lowered.ops)
    bodies = {
        name: bool(updated_buffers(op.op for op in block.ops))
        for name, block in lowered.blocks.items()
    }
    for place, op in enumerate(lowered.ops):
        held = updated.intersection(op.op.inputs)
        if op.op.kind == "block" and bodies[op.op.attrs["block"]]:
            held.add(op.op.attrs["instance"])  # with the buffers of its own
        for name in held:
            places.setdefault(name, []).append(place)
    return [(held[0], held[-1]) for held in places.values() if held[-1] > held[0]]


def _ties(lowered: Lowered, units: Sequence[str]) -> tuple[tuple[int, int], ...]:
    starts = {name: i for i, name in enumerate(units)}
    last: dict[str, int] = {}
    ties = []
    for op in lowered.ops:
        if op.op.kind == "block" and op.op.name in starts:
            unit, instance = starts[op.op.name], op.op.attrs["instance"]
            if instance in last:
                ties.append((last[instance], unit))
            last[instance] = unit
    return tuple(ties)


def _kinds(
    lowered: Lowered, units: Sequence[str], ties: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """Of each unit a number for what its ops are, how what they read and give is resharded, and how
    far before it the same parameters stand. Where that is farther than in every run that a longer
    one is told from (`runs.KEPT`), units are alike only in a pattern that repeats them too."""
    starts = {name: i for i, name in enumerate(units)}
    instances = {op.op.name: op.op.attrs.get("instance") for op in lowered.ops}
    of_unit: list[list[object]] = [[] for _ in units]
    for before, unit in ties:
        instance = instances[units[unit]] if unit - before >= KEPT else ""
        of_unit[unit].append((unit - before, instance))
    unit = 0
    for op in lowered.ops:
        unit = starts.get(op.op.name, unit)
        called = op.op.name if op.bound else f"block {op.op.attrs['block']}"
        moved = tuple(operand.steps for operand in op.operands)
        given = tuple(lowered.tensors[name].steps for name in op.op.outputs)
        of_unit[unit].append((called, moved, given))
    numbers: dict[tuple[object, ...], int] = {}
    return tuple(numbers.setdefault(tuple(ops), len(numbers)) for ops in of_unit)
