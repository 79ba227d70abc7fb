"""Why a plan is as it is: what each op does on the mesh, what it moves, what else was close."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autopar.lowering import MICROBATCH, Lowered, Priced, activation_collectives
from autopar.nouns.plan import key
from autopar.report.render import indented, table
from autopar.report.units import duration, percent, size
from autopar.rules.resharding import Collective


@dataclass(frozen=True, slots=True)
class Moved:
    """One kind of collective at one place: ``count`` times a step, ``time_s`` for all of them."""

    direction: str
    collective: Collective
    count: int
    time_s: float

    def __str__(self) -> str:
        moved = self.collective
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{self.direction} {times}{moved.kind}({moved.axis}) {size(moved.size_bytes)}"


@dataclass(frozen=True, slots=True)
class Explained:
    """One op: its strategy, its own time in a step, and the collectives at it and behind it."""

    key: str
    kind: str
    source: str
    strategy: str
    compute_s: float
    moved: tuple[Moved, ...]

    @property
    def communication_s(self) -> float:
        return sum(moved.time_s for moved in self.moved)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A step would take ``extra_s`` more if this op ran so and all others were chosen anew."""

    strategy: str
    extra_s: float


def explained(
    lowered: Lowered,
    compute_ps: Mapping[str, int],
    price_ps: Callable[[Collective], int],
) -> list[Explained]:
    """Every op of the model, blocks first, each block once for all of its calls.

    compute_ps: for each op key, picoseconds of one microbatch (of one call in a block).
    price_ps:   picoseconds of one collective.
    """
    moved: dict[str, list[Moved]] = defaultdict(list)
    for place, count in _merged(activation_collectives(lowered)).items():
        where, direction, collective = place
        time_s = price_ps(collective) * count / 1e12
        moved[where].append(Moved(direction, collective, count, time_s))
    return list(_ops(lowered, compute_ps, moved, _calls(lowered)))


def explain(
    rows: Sequence[Explained],
    alternatives: Mapping[str, Sequence[Alternative]],
    step_time_s: float,
) -> list[RenderableType]:
    """Tables by block: one line an op, its collectives under it, then what else was close."""
    parts: list[RenderableType] = []
    for block, members in _by_block(rows).items():
        busy = sum(row.compute_s for row in members)
        moving = sum(row.communication_s for row in members)
        title = f"{block or 'outside the blocks'}: compute {duration(busy)}"
        title += f", collectives {duration(moving)} a step"
        lines = table("op", "strategy", "a step", "of it", "moves", right=("a step", "of it"))
        for row in members:
            time_s = row.compute_s + row.communication_s
            moves = "\n".join(f"{move}: {duration(move.time_s)}" for move in row.moved)
            name = row.key.removeprefix(f"{block}::")
            share = percent(time_s / step_time_s) if step_time_s else ""
            lines.add_row(name, row.strategy, duration(time_s), share, moves)
        parts += [Text(title, style="bold"), indented(lines), Text()]
    if alternatives:
        parts += [Text("What else was close (everything else chosen anew)", style="bold")]
        parts += [indented(_close(alternatives)), Text()]
    return parts


def explain_object(
    rows: Sequence[Explained], alternatives: Mapping[str, Sequence[Alternative]]
) -> dict[str, Any]:
    """What ``autopar explain --json`` prints."""
    return {
        "ops": [
            {
                "key": row.key,
                "kind": row.kind,
                "source": row.source,
                "strategy": row.strategy,
                "compute_s": row.compute_s,
                "collectives": [
                    {
                        "direction": move.direction,
                        "kind": move.collective.kind,
                        "axis": move.collective.axis,
                        "size_bytes": move.collective.size_bytes,
                        "count": move.count,
                        "time_s": move.time_s,
                    }
                    for move in row.moved
                ],
                "alternatives": [
                    {"strategy": other.strategy, "extra_s": other.extra_s}
                    for other in alternatives.get(row.key, ())
                ],
            }
            for row in rows
        ]
    }


def _merged(priced: Iterator[Priced]) -> dict[tuple[str, str, Collective], int]:
    counts: dict[tuple[str, str, Collective], int] = defaultdict(int)
    for one in priced:
        counts[one.key, one.direction, one.collective] += one.count
    return counts


def _calls(lowered: Lowered) -> dict[str | None, int]:
    """How often each block's body runs in a step; None is the top level."""
    calls: dict[str | None, int] = defaultdict(int)
    times = lowered.mesh.size(MICROBATCH)
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
    for given in lowered.graph.inputs:
        name = key(lowered.block, given)
        if moves := moved.get(name):
            yield Explained(name, "input", "", "", 0.0, tuple(moves))
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
            str(op.strategy),
            compute_ps[name] * calls[lowered.block] / 1e12,
            tuple(move for place in places for move in moved.get(place, ())),
        )


def _by_block(rows: Sequence[Explained]) -> dict[str, list[Explained]]:
    blocks: dict[str, list[Explained]] = defaultdict(list)
    for row in rows:
        block, inside, _ = row.key.partition("::")
        blocks[block if inside else ""].append(row)
    return blocks


def _close(alternatives: Mapping[str, Sequence[Alternative]]) -> RenderableType:
    lines = table("op", "instead", "the step would take", right=("the step would take",))
    for name, others in alternatives.items():
        for other in others:
            lines.add_row(name, other.strategy, f"+{duration(other.extra_s)}")
    return lines
