"""What a lowered plan costs before state sharding is chosen.

One lowering serves every ZeRO level, every split of the data axes and every recompute policy: those
do not change what a rank computes in a microbatch, only how its model state is kept and moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import PurePath
from typing import TypeVar

import numpy as np

from autopar.lowering.collectives import loss_bytes
from autopar.lowering.counts import global_counts, label_collectives
from autopar.lowering.issued import internal_collectives, last_kept, rerun_collectives
from autopar.lowering.lowered import Lowered
from autopar.lowering.routed_pieces import pieces_of
from autopar.lowering.shared_experts import beside_of
from autopar.lowering.state import LOSS_BYTES
from autopar.nouns.axes import SLICE
from autopar.nouns.cluster import Cluster
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.plan import key
from autopar.nouns.recompute import Recompute
from autopar.pricing.op_prices import inside_of
from autopar.pricing.parameters import buffer_bytes, parameters_of, read_late
from autopar.pricing.prices import PICOSECONDS, Prices
from autopar.pricing.tp_pieces import InPieces
from autopar.pricing.units.activations import (
    activation_lives,
    is_ring,
    keeps_result,
    kept_by_policy,
    saved_parameters,
    waiting_bytes,
)
from autopar.pricing.units.unit import Kind, Sliced, Unit
from autopar.pricing.units.walk import Life
from autopar.pricing.xla_lives import XlaLives, xla_lives
from autopar.rules.flops import again_share
from autopar.rules.implementations.table import KEPT_ROWS, work_of_slices
from autopar.rules.resharding import SHIFT


@dataclass(frozen=True, slots=True)
class Summary:
    """``calls``: the block of each call, in order; ``copies``: parameter sets by block;
    ``bodies``: one call of each, without its parameters where they travel with the root's."""

    root: Unit
    bodies: Mapping[str, Unit]
    calls: tuple[str, ...]
    copies: Mapping[str, int]
    lives: Mapping[str, Life]
    buffer_bytes: int
    counts: int = 0
    """Losses that are means over the labelled tokens of the batch."""
    labels_s: float = 0.0
    """What a microbatch's labels move to be counted."""
    loss_bytes: int = LOSS_BYTES
    packages: frozenset[str] = frozenset()
    """Installed packages that the model's code lies in."""
    xla: XlaLives | None = None
    """Of a JAX program: what its memory hangs on in place of ``lives``."""
    inner_lives: Mapping[str, Mapping[str, Life]] = field(default_factory=dict)
    """Of one call, by block."""
    kept: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Bytes that one call leaves for backward, by block and recompute policy."""
    whole: Mapping[str, Unit] = field(default_factory=dict)
    """``bodies``, each with its parameters."""
    late: Mapping[Kind, int] = field(default_factory=dict)
    """Of the root's trained parameters, elements of those that an op behind the blocks reads: their
    gradients come first."""
    waiting: Mapping[str, int] = field(default_factory=dict)
    """Bytes of gradients that a backward in two parts leaves to its second, of one call by block,
    and by ``""`` of what lies outside."""

    def life(self, recompute: Recompute) -> Life:
        """One microbatch under a policy, or where the calls that come first do more."""
        if self.xla is not None:  # one policy for all calls
            moments = self.xla.by_policy[recompute.policy]
            return Life(moments.saved, moments.loss, "", moments.loss)
        each = recompute.by_call(len(self.calls))
        if recompute.count is None or len({*each}) < 2:
            return self.lives[each[0] if each else recompute.policy]
        deep, light = self.lives[each[0]], self.lives[each[-1]]
        kept = [self.kept[name] for name in self.calls]
        less = sum(of[each[-1]] - of[policy] for of, policy in zip(kept, each, strict=True))
        saved = light.saved - less
        # Up to the last call that does most, memory is as if all calls did; from there on it is by
        # ``less`` below where none does.
        lighter = saved - light.saved
        peak, where = max((deep.peak, deep.where), (lighter + light.peak, light.where))
        inside = max(deep.inside, lighter + light.inside)
        return Life(saved, peak, where, lighter + light.outside, inside)

    @property
    def waiting_bytes(self) -> int:
        """Of one microbatch that waits for the second part of its backward."""
        waiting = self.waiting
        return waiting.get("", 0) + sum(waiting.get(name, 0) for name in self.calls)

    def owners(self) -> Iterator[tuple[Unit, int]]:
        """Each unit that owns parameters, with how many sets of them there are."""
        yield self.root, 1
        for name, unit in self.bodies.items():
            yield unit, self.copies[name]

    @property
    def cutting(self) -> frozenset[str]:
        """The model axes that cut a trained parameter."""
        return self.root.cutting.union(*(unit.cutting for unit in self.bodies.values()))


def summarise(
    lowered: Lowered, prices: Prices, framework: str = "torch", known: Summary | None = None
) -> Summary:
    """Adds up a lowered plan by unit. ``known``: of a graph with the same blocks, and more."""
    root = _unit(lowered, prices)
    inner: dict[str, Mapping[str, Life]] = {}
    kept: dict[str, Mapping[str, int]] = {}
    if known is None:
        whole = {name: _unit(body, prices) for name, body in lowered.blocks.items()}
    else:
        whole = {name: known.whole[name] for name in lowered.blocks}
    if framework != "jax":  # of JAX programs `XlaLives` has it
        for name, body in lowered.blocks.items():
            inner[name] = activation_lives(body) if known is None else known.inner_lives[name]
            kept[name] = kept_by_policy(body, inner[name]) if known is None else known.kept[name]
    bodies = dict(whole)
    for name, block in lowered.graph.blocks.items():
        if not block.units:  # its parameters travel with the root's
            held, copies = bodies[name], len(dict.fromkeys(block.instances))
            root = replace(
                root,
                trained=_sum(root.trained, held.trained, copies),
                frozen=_sum(root.frozen, held.frozen, copies),
                deferred=_sum(root.deferred, held.deferred, copies),
            )
            bodies[name] = replace(held, trained={}, frozen={}, deferred={})
    return Summary(
        root=root,
        bodies=bodies,
        whole=whole,
        calls=tuple(op.op.attrs["block"] for op in lowered.ops if op.bound is None),
        copies={
            name: len(dict.fromkeys(block.instances))
            for name, block in lowered.graph.blocks.items()
        },
        lives={} if framework == "jax" else activation_lives(lowered, inner, kept),
        inner_lives=inner,
        kept=kept,
        buffer_bytes=buffer_bytes(lowered),
        counts=global_counts(lowered.graph),
        labels_s=sum(prices.collective(c) for _, c in label_collectives(lowered)) / PICOSECONDS,
        loss_bytes=loss_bytes(lowered),
        packages=frozenset(_packages(lowered)),
        xla=_xla(lowered, prices.cluster, known) if framework == "jax" else None,
        late=read_late(lowered),
        waiting={
            name: waiting_bytes(part) for name, part in {"": lowered, **lowered.blocks}.items()
        },
    )


K = TypeVar("K")


def _sum(one: Mapping[K, int], more: Mapping[K, int], times: int) -> dict[K, int]:
    return {k: one.get(k, 0) + times * more.get(k, 0) for k in dict.fromkeys((*one, *more))}


def _xla(lowered: Lowered, cluster: Cluster, known: Summary | None) -> XlaLives:
    on_tpu = cluster.device.kind == "tpu"
    slices = on_tpu and cluster.levels and cluster.levels[-1].topology != "torus"
    return xla_lives(lowered, on_tpu, known.xla if known else None, hoists=bool(slices))


def _unit(lowered: Lowered, prices: Prices) -> Unit:
    forward, backward, weights, split, light, rings = _computed(lowered, prices)
    pieces = InPieces.of(lowered, prices)
    moved, met = _moved(lowered, prices, pieces)
    trained, frozen, deferred, cutting = parameters_of(lowered)
    added = adding(trained, prices)
    return Unit(
        forward / PICOSECONDS,
        (backward + added) / PICOSECONDS,
        moved[0] / PICOSECONDS,
        moved[1] / PICOSECONDS,
        _moved_again(lowered, prices, pieces) / PICOSECONDS,
        met,
        trained,
        frozen,
        deferred,
        saved_parameters(lowered),
        (weights + added) / PICOSECONDS,
        light / PICOSECONDS,
        rings / PICOSECONDS,
        cutting,
        split / PICOSECONDS,
        _sliced_s(lowered, prices),
    )


def adding(trained: Mapping[Kind, int], prices: Prices) -> int:
    """Picoseconds of adding a unit's gradients to those of the microbatches before."""
    return prices.added(sum(n * DTYPE_BYTES[kind.dtype] for kind, n in trained.items()))


def _moved_again(lowered: Lowered, prices: Prices, pieces: InPieces) -> int:
    """Picoseconds of collectives of a forward that runs again; what passes around a ring as far as
    its compute leaves it bare."""
    hiding = [op for op in lowered.ops if pieces_of(lowered, op) > 1 or beside_of(lowered, op)]
    routed = {key(lowered.block, op.op.name) for op in hiding}
    again = [p for p in rerun_collectives(lowered) if p.collective.kind != SHIFT]
    again = [p for p in again if p.key not in routed]
    beside = {key(lowered.block, n): p.forward_ps for n, p in pieces.by_name.items()}
    moved = sum(p.count * prices.collective(p.collective) for p in again if p.key not in beside)
    moved += sum(beside[where] for where in {p.key for p in again} & beside.keys())
    rings = (op for op in lowered.ops if is_ring(op, lowered.mesh))
    tensors, scope = lowered.graph.tensors, lowered.block
    moved += sum(prices.inside(op, tensors, scope)[0] for op in rings)
    moved += sum(
        inside_of(prices, lowered, op)[0]
        for op in lowered.ops[: last_kept(lowered) + 1]
        if key(scope, op.op.name) in routed
    )
    return moved


def _computed(lowered: Lowered, prices: Prices) -> tuple[int, int, int, int, int, int]:
    """Picoseconds of arithmetic: forward, backward; of that gradients of parameters; what a
    backward in two parts makes again once more; of forward what runs again even where the results
    of products are kept, and attention around rings."""
    tensors = lowered.graph.tensors
    forward = backward = weights = split = light = rings = 0
    for op in lowered.ops:
        if op.bound is None:
            continue
        ahead, back = prices.compute(op, tensors, lowered.block)
        forward, backward = forward + ahead, backward + back
        light += prices.scaled_again(op, tensors) if keeps_result(op) else ahead
        if is_ring(op, lowered.mesh):
            rings += ahead
        if any(tensors[n].role == "parameter" and tensors[n].differentiable for n in op.op.inputs):
            weights += min(ahead, back)
            split += round(ahead * again_share(op.bound, op.strategy, lowered.mesh))
    return forward, backward, weights, split, light, rings


def _sliced_s(lowered: Lowered, prices: Prices) -> Sliced:
    """`Unit.sliced_s`."""
    slices = lowered.mesh.size(SLICE)
    every = np.zeros((slices, 2))
    for op in lowered.ops:
        if op.bound is not None and KEPT_ROWS in op.implementations:
            (row,) = (e for e in op.bound.rule.implementations if e.name == KEPT_ROWS)
            more = np.array(work_of_slices(slices, row.reach)) - 1
            took = prices.compute(op, lowered.graph.tensors, lowered.block)
            every += more[:, None] * np.array(took) / PICOSECONDS
    return tuple((ahead, back) for ahead, back in every.tolist()) if slices > 1 else ()


def _moved(
    lowered: Lowered, prices: Prices, pieces: InPieces
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Picoseconds of collectives over model axes, and how many there are, both ways."""
    tensors, fusion, scope = lowered.graph.tensors, prices.fusion, lowered.block
    steps = [
        (v.steps, v.tensor, v.tensor.differentiable, key(scope, name) in fusion.handed)
        for name, v in lowered.tensors.items()
    ]
    steps += [
        (o.steps, tensors[o.name], o.differentiable, fusion.takes(scope, op.op, i))
        for op in lowered.ops
        for i, o in enumerate(op.operands)
        if o.steps
    ]
    steps += [(o.steps, tensors[o.name], o.differentiable, False) for o in lowered.outputs]
    forward = backward = met_forward = met_backward = 0
    for some, tensor, grad, handed in steps:
        usual = prices.steps(some, tensor, grad, handed)
        ahead, back = pieces.moved(tensor.name, some, usual)
        forward, backward = forward + ahead, backward + back
        met_forward += ahead > 0
        met_backward += back > 0
    for op in lowered.ops:
        met = [i.direction for i in internal_collectives(op, lowered.mesh)] if op.bound else []
        if met:
            ahead, back = inside_of(prices, lowered, op)
            forward, backward = forward + ahead, backward + back
            met_forward += met.count("forward")
            met_backward += met.count("backward")
    return (forward, backward), (met_forward, met_backward)


def _packages(lowered: Lowered) -> Iterator[str]:
    for op in lowered.ops:
        yield from _package(op.op.source.file)
    for body in lowered.blocks.values():
        yield from _packages(body)


@lru_cache(maxsize=1 << 12)
def _package(file: str) -> tuple[str, ...]:
    """The installed package that a file lies in; none: in none."""
    parts = PurePath(file).parts
    if "site-packages" not in parts[:-1]:
        return ()
    return (parts[parts.index("site-packages") + 1],)
