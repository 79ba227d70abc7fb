"""What each op of a plan does on its mesh, what it moves, and what moves model state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.lowering.issued import Priced, activation_collectives
from autopar.lowering.lowered import Lowered
from autopar.nouns.plan import key
from autopar.nouns.prediction import Memory
from autopar.pricing.op_prices import bare_each
from autopar.pricing.prices import Prices
from autopar.pricing.tp_pieces import InPieces
from autopar.report.implementations import Running
from autopar.report.units import duration, size
from autopar.rules.narrow import RECIPE
from autopar.rules.resharding import Collective


@dataclass(frozen=True, slots=True)
class Moved:
    """One kind of collective at one place: ``count`` times a step, ``time_s`` for all of them.

    ``beside``: in pieces beside products, of whose time it is what they do not hide.
    """

    direction: str
    collective: Collective
    count: int
    time_s: float
    beside: bool = False

    def __str__(self) -> str:
        moved, beside = self.collective, " beside products" if self.beside else ""
        way = "fwd" if self.direction == "forward" else "bwd"
        times = f"{self.count} x " if self.count > 1 else ""
        what = f"{moved.kind}({moved.axis}) {size(moved.size_bytes)}"
        return f"{way} {times}{what}{beside}, {duration(self.time_s)}"


@dataclass(frozen=True, slots=True)
class Explained:
    """One op: its strategy, its own time in a step, and the collectives at it and behind it."""

    key: str
    kind: str
    source: str
    rule: str
    strategy: str
    compute_s: float
    moved: tuple[Moved, ...]
    implementations: Running = field(default_factory=dict)
    recipe: str = ""
    """By which products of a linear layer run in 8 bits."""

    @property
    def way(self) -> str:
        """Strategy and recipe."""
        return f"{self.strategy}, {self.recipe}" if self.recipe else self.strategy

    @property
    def communication_s(self) -> float:
        return sum(moved.time_s for moved in self.moved)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A step would take ``extra_s`` more if this op ran so and all others were chosen anew.

    ``objection``: where that is less than nothing, why the plan does not do it.
    """

    strategy: str
    extra_s: float
    objection: str = ""

    def __str__(self) -> str:
        if self.extra_s < 0:
            return f"{self.strategy} -{duration(-self.extra_s)}: {self.objection}"
        if not self.extra_s:
            return f"{self.strategy}, as fast"
        return f"{self.strategy} +{duration(self.extra_s)}"


def _compute_times(lowered: Lowered, prices: Prices) -> dict[str, int]:
    """Picoseconds of each op's arithmetic for one microbatch; a block's ops for one call."""
    times = {
        key(lowered.block, op.op.name): sum(
            prices.compute(op, lowered.graph.tensors, lowered.block)
        )
        for op in lowered.ops
        if op.bound is not None
    }
    for body in lowered.blocks.values():
        times.update(_compute_times(body, prices))
    return times


def explained(lowered: Lowered, prices: Prices) -> list[Explained]:
    """Every op of the model, blocks first, each block once for all of its calls."""
    moved: dict[str, list[Moved]] = defaultdict(list)
    pieces, travelling = InPieces.by_key(lowered, prices), bare_each(prices, lowered)
    for place, count in _merged(activation_collectives(lowered), _between(lowered)).items():
        where, direction, collective, largest = place
        time_s = prices.collective(largest or collective) * count / 1e12
        if one := pieces.get(where):
            added_ps = one.forward_ps if direction == "forward" else one.backward_ps
            time_s = added_ps * count / one.pieces / 1e12
        routed_s = travelling.get((where, direction, collective))
        if routed_s is not None:
            time_s = routed_s * count
        is_beside = one is not None or routed_s is not None
        moved[where].append(Moved(direction, collective, count, time_s, is_beside))
    return list(_ops(lowered, _compute_times(lowered, prices), moved, _calls(lowered)))


@dataclass(frozen=True, slots=True)
class StateMoved:
    """Traffic of parameters, gradients and counts in a step: bytes of all ``count`` collectives."""

    what: str
    kind: str
    axis: str
    count: int
    size_bytes: int


def state_moved(lowered: Lowered, rows: Sequence[Mapping[str, Any]]) -> list[StateMoved]:
    """The rows of ``collectives.json`` that no activation causes; equal purposes added up.

    A purpose is the last word of a row's text: ``forward`` and ``backward`` gather parameters.
    """
    moving = {f"{p.key} {p.direction}" for p in activation_collectives(lowered)}
    counts: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        if row["what"] not in moving:
            total = counts[
                _PURPOSE.get(row["what"].split()[-1], row["what"]), row["kind"], row["axis"]
            ]
            total[0] += row["count"]
            total[1] += row["count"] * row["size_bytes"]
    return [StateMoved(*place, count, moved) for place, (count, moved) in counts.items()]


def streamed(memory: Memory) -> list[StateMoved]:
    """What a step moves of the optimizer's state that is in host memory."""
    if not memory.host:
        return []
    return [StateMoved("optimizer state, in and out", "copy", "host", 1, 2 * memory.host)]


_PURPOSE = {
    "sent": "activations and their gradients, sent",
    "received": "activations and their gradients, received",
    "tie": "gradients of tied parameters",
    "forward": "parameters, for forward",
    "backward": "parameters, for backward",
    "gradients": "gradients",
}


def _merged(
    priced: Iterator[Priced], named: Mapping[str, str]
) -> dict[tuple[str, str, Collective, Collective | None], int]:
    counts: dict[tuple[str, str, Collective, Collective | None], int] = defaultdict(int)
    for one in priced:
        where = named.get(one.key, one.key)
        counts[where, one.direction, one.collective, one.largest] += one.count
    return counts


def _between(lowered: Lowered) -> dict[str, str]:
    """Results of all calls of a block under the name of its first, so that they are one row."""
    first: dict[tuple[str, int], str] = {}
    return {
        name: first.setdefault((op.op.attrs["block"], position), name)
        for op in lowered.ops
        if op.bound is None
        for position, name in enumerate(op.op.outputs)
    }


def _calls(lowered: Lowered) -> dict[str | None, int]:
    """How often each block's body runs in a step; None is the top level."""
    calls: dict[str | None, int] = defaultdict(int)
    times = lowered.passes
    calls[None] = times
    for op in lowered.ops:
        if op.bound is None:
            calls[op.op.attrs["block"]] += times
    return calls


def _ops(
    lowered: Lowered,
    compute_ps: Mapping[str, int],
    moved: Mapping[str, list[Moved]],
    calls: Mapping[str | None, int],
) -> Iterator[Explained]:
    for body in lowered.blocks.values():
        yield from _ops(body, compute_ps, moved, calls)
    made = {name for op in lowered.ops if op.bound is not None for name in op.op.outputs}
    for name, tensor in lowered.graph.tensors.items():
        where = key(lowered.block, name)
        if name not in made and where in moved:
            yield Explained(
                where, tensor.role, "", "", f"({tensor.role})", 0.0, tuple(moved[where])
            )
    for op in lowered.ops:
        if op.bound is None:
            continue
        name = key(lowered.block, op.op.name)
        # Collectives are filed under the tensor that moves: the op's results, and its own key.
        places = dict.fromkeys(key(lowered.block, result) for result in op.op.outputs)
        yield Explained(
            name,
            op.op.kind,
            str(op.op.source),
            str(op.bound),
            str(op.strategy),
            compute_ps[name] * calls[lowered.block] / 1e12,
            tuple(move for place in places for move in moved.get(place, ())),
            op.implementations,
            op.op.attrs.get(RECIPE, ""),
        )
