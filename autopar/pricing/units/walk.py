"""Live bytes along the ops of one graph, forward and backward.

What lives of a graph's own tensors at each op is one walk, whatever its blocks do; what calls of
blocks keep, and need while they run, is added to it for each policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autopar.nouns.graph import Source
from autopar.pricing.units.places import Places
from autopar.rules.held_bytes import workspace_back_bytes, workspace_bytes


@dataclass(frozen=True, slots=True)
class Life:
    """One pass through a graph: ``saved`` at the end of forward, ``peak`` at the worst moment;
    ``outside``: at the worst one while no block runs, ``inside``: while one does."""

    saved: int
    peak: int
    where: str
    outside: int = 0
    inside: int = 0


class Moment(NamedTuple):
    """While an op runs. ``live``: bytes of the graph's own tensors, with the workspace of the op;
    ``calls``: of blocks that keep something then, as many entries as `Walk.blocks`; ``block``: that
    which runs, by its place there, -1 for none."""

    live: int
    calls: tuple[int, ...]
    block: int
    source: Source


@dataclass(frozen=True, slots=True)
class Walk:
    """``saved``: bytes of the graph's own tensors at the end of forward; ``calls``: of each of the
    ``blocks``; ``moments``: forward, then backward."""

    blocks: tuple[str, ...]
    saved: int
    calls: tuple[int, ...]
    moments: tuple[Moment, ...]

    @staticmethod
    def of(places: Places, fused: Collection[str] = ()) -> Walk:
        """``fused``: kinds of ops whose workspace the compiler writes nowhere."""
        ops = places.lowered.ops
        blocks = tuple(dict.fromkeys(o.op.attrs["block"] for o in ops if o.bound is None))
        moments = [*_forward(places, blocks, fused)]
        calls = [0] * len(blocks)
        for moment in moments:
            if moment.block >= 0:
                calls[moment.block] += 1
        moments += _backward(places, blocks, calls, fused)
        return Walk(blocks, sum(places.saved.values()), tuple(calls), tuple(moments))

    def life(self, bodies: Mapping[str, Life], kept: Mapping[str, int]) -> Life:
        """``bodies``: one call of each block; ``kept``: bytes that it leaves for its backward."""
        left = [kept[name] for name in self.blocks]
        inside = [*(bodies[name].peak for name in self.blocks), 0]
        peak, where, worst_of = 0, "", [0, 0]
        worst: Moment | None = None
        for moment in self.moments:
            live = moment.live + inside[moment.block]
            for count, size in zip(moment.calls, left, strict=True):
                live += count * size
            if live > peak:
                peak, worst = live, moment
            runs = moment.block >= 0
            worst_of[runs] = max(worst_of[runs], live)
        if worst is not None:
            where = str(worst.source)
        saved = self.saved + sum(n * size for n, size in zip(self.calls, left, strict=True))
        return Life(saved, peak, where, *worst_of)


def _forward(places: Places, blocks: tuple[str, ...], fused: Collection[str]) -> Iterator[Moment]:
    saved, lowered = places.saved, places.lowered
    last = {place: i for i, reads in enumerate(places.reads) for place, _ in reads}
    held = 0  # saved storage made so far
    calls = [0] * len(blocks)
    temporary: dict[str, int] = {}
    seen: set[str] = set()
    for i, op in enumerate(lowered.ops):
        made = [(root, places.size[root]) for root in places.makes[i]]
        for place, size in (*places.reads[i], *made):
            if place in saved:
                held += size if place not in seen else 0
                seen.add(place)
            elif places.is_temporary(place):
                temporary.setdefault(place, size)
        held += saved.get(f"{op.op.name} keeps", 0)
        live = held + sum(temporary.values())
        if op.bound is None:
            block = blocks.index(op.op.attrs["block"])
            yield Moment(live, tuple(calls), block, op.op.source)
            calls[block] += 1
        else:
            if op.op.kind not in fused:
                live += workspace_bytes(op.bound, op.strategy, lowered.mesh)
            yield Moment(live, tuple(calls), -1, op.op.source)
        for place in [p for p in temporary if last.get(p, i) <= i]:
            del temporary[place]


def _backward(
    places: Places, blocks: tuple[str, ...], calls: list[int], fused: Collection[str]
) -> Iterator[Moment]:
    """``calls``: of each block at the end of forward."""
    ops, tensors = places.lowered.ops, places.lowered.graph.tensors
    first: dict[str, int] = {}
    for i, op in enumerate(ops):
        read = [place for place, _ in places.reads[i]]
        for place in (*read, *places.makes[i], f"{op.op.name} keeps"):
            first.setdefault(place, i)
    release: dict[int, int] = {}
    for place, size in places.saved.items():
        release[first.get(place, 0)] = release.get(first.get(place, 0), 0) + size
    held, left = sum(places.saved.values()), [*calls]
    gradients: dict[str, int] = {}
    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        if any(tensors[n].differentiable for n in op.op.outputs):
            for name in op.op.inputs:
                if tensors[name].differentiable and places.is_activation(name):
                    root = places.root[name]
                    gradients[root] = places.size[root]
        block, beside = -1, 0
        if op.bound is None:
            block = blocks.index(op.op.attrs["block"])
            left[block] -= 1
        elif op.op.kind not in fused:
            beside = workspace_back_bytes(op.bound, op.strategy, places.lowered.mesh)
        yield Moment(held + sum(gradients.values()) + beside, tuple(left), block, op.op.source)
        held -= release.get(i, 0)
        for name in op.op.outputs:
            if places.root[name] == name:
                gradients.pop(name, None)
