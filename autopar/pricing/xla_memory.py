"""Memory of a JAX program on one device, as XLA lays it out for the compiled step.

A step's arguments (parameters, optimizer state, batch) are there all the time; its temporary arrays
are one allocation as large as the worst moment of the step::

    loss      what all layers keep + the root's tensors and their gradients, logits among them
    layers    what all layers keep + gradients + one layer's tensors, weights and gradients
    update    gradients, before and after they are reduced + the pieces that the optimizer makes

The layers of a block are a loop, so what they keep is stacked arrays that are there until it ends.
A layer keeps the results of products, lookups, attention and collectives that its backward pass
reads or makes other tensors from (`autopar.nouns.costly`); all else is made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.nouns import costly
from autopar.nouns.axes import MICROBATCH
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.recompute import Recompute, policies
from autopar.pricing.state import StateSharding
from autopar.pricing.units.activations import (
    Life,
    Places,
    Walk,
    activation_lives,
    moved_bytes,
    moves,
)
from autopar.pricing.units.unit import Kind

_COSTLY = frozenset(kind for row in costly.TABLE for kind in row.kinds)


@dataclass(frozen=True, slots=True)
class Moments:
    """Bytes of activations under one recompute policy: at the loss; what layers keep; of one
    layer's own tensors while its backward pass runs; and what all keep for backward, the root too.
    """

    loss: int
    kept: int
    layer: int
    saved: int


@dataclass(frozen=True, slots=True)
class XlaLives:
    """What the memory of a program hangs on beside its state.

    by_policy:  `Moments` for each recompute policy.
    batch:      bytes of the batch on one device, all microbatches.
    products:   elements of the root's parameters that products read, by kind.
    largest:    elements of the largest parameter of any layer, by kind.
    """

    by_policy: Mapping[str, Moments]
    batch: int
    products: Mapping[Kind, int]
    largest: Mapping[Kind, int]


def xla_lives(lowered: Lowered) -> XlaLives:
    """One microbatch followed through the root and through one layer of each block."""
    root = Places(lowered)
    bodies = {name: Places(body) for name, body in lowered.blocks.items()}
    # a layer's forward pass runs again, as a whole or in part, before its backward pass
    inner = {n: activation_lives(body)["none"].peak for n, body in lowered.blocks.items()}
    by_policy = {}
    for policy in policies("jax"):
        kept = {
            name: {
                "none": _kept_bytes(places),
                "compute": moved_bytes(lowered.blocks[name]),
                "full": 0,
            }[policy]
            for name, places in bodies.items()
        }
        outside = {name: Life(0, 0, "") for name in bodies}
        life = Walk(root, outside, kept).run()
        by_policy[policy] = Moments(
            loss=life.peak,
            kept=_stacks(lowered, root, kept),
            layer=max(inner.values(), default=0),
            saved=life.saved,
        )
    return XlaLives(by_policy, _batch_bytes(lowered), _in_products(lowered), _largest(lowered))


def _kept_bytes(places: Places) -> int:
    """What one layer keeps where nothing is recomputed that costs anything."""
    lowered = places.lowered
    maker: dict[str, int] = {}
    for i, made in enumerate(places.makes):
        for root in made:
            maker.setdefault(root, i)  # a view's is that of what it views
    sizes = {place: size for reads in places.reads for place, size in reads}
    todo = [place for place in places.saved if not place.endswith(" keeps")]
    kept: dict[str, int] = {}
    seen = set(todo)
    while todo:
        place = todo.pop()
        op = lowered.ops[maker[place]] if place in maker else None
        if _is_moved(lowered, place) or (op is not None and _is_costly(op)):
            kept[place] = sizes.get(place, places.size.get(place, 0))
        elif op is not None:
            read = {p for p, _ in places.reads[maker[place]] if places.is_temporary(p)}
            todo += read - seen
            seen |= read
    return sum(kept.values())


def _is_moved(lowered: Lowered, place: str) -> bool:
    """Whether a collective gave the tensor at ``place``."""
    value = lowered.tensors.get(place)
    return value is None or moves(value.steps)


def _is_costly(op: LoweredOp) -> bool:
    return op.bound is not None and (op.bound.rule.cost == "matmul" or op.op.kind in _COSTLY)


def _stacks(lowered: Lowered, root: Places, kept: Mapping[str, int]) -> int:
    """What the layers keep, together with their inputs."""
    total = 0
    inputs: dict[str, int] = {}
    for op, reads in zip(lowered.ops, root.reads, strict=True):
        if op.bound is None:
            total += kept[op.op.attrs["block"]]
            inputs.update(reads)
    return total + sum(inputs.values())


def _batch_bytes(lowered: Lowered) -> int:
    tensors = lowered.tensors
    return lowered.mesh.size(MICROBATCH) * sum(
        math.prod(tensors[n].produced.local_shape(tensors[n].tensor.shape, lowered.mesh))
        * DTYPE_BYTES[tensors[n].tensor.dtype]
        for n in lowered.graph.inputs
    )


def _parameters(lowered: Lowered) -> Iterator[tuple[str, Kind, int]]:
    """Name, kind and elements on one model rank."""
    for name, value in lowered.tensors.items():
        if value.tensor.role == "parameter":
            local = value.produced.local_shape(value.tensor.shape, lowered.mesh)
            yield name, Kind(value.tensor.dtype), math.prod(local)


def _in_products(lowered: Lowered) -> dict[Kind, int]:
    read = {
        n
        for op in lowered.ops
        if op.bound is not None and _is_costly(op) and op.op.kind != "embedding"
        for n in op.op.inputs
    }
    numel_of: dict[Kind, int] = {}
    for name, kind, numel in _parameters(lowered):
        if name in read:
            numel_of[kind] = numel_of.get(kind, 0) + numel
    return numel_of


def _largest(lowered: Lowered) -> dict[Kind, int]:
    numel_of: dict[Kind, int] = {}
    for body in lowered.blocks.values():
        for _, kind, numel in _parameters(body):
            numel_of[kind] = max(numel_of.get(kind, 0), numel)
    return numel_of


Numels = Mapping[Kind, int]
"""Elements by kind."""


def xla_moments(
    lives: XlaLives,
    recompute: Recompute,
    state: StateSharding,
    root: Numels,
    layers: Sequence[tuple[Numels, int]],
) -> dict[str, int]:
    """Bytes of temporary arrays at each moment of a step.

    root and layers: trained parameters on one model rank, outside of blocks and of one layer of
    each block with the number of layers.
    """
    moments = lives.by_policy[recompute.policy]
    every = [(root, 1), *layers]
    gradients = _total(every, state.gradient_bytes)
    accumulated = gradients if state.microbatches > 1 else 0
    # weights that are no arguments: gathered, or in another dtype. Else a layer's are cut off the
    # stack when they are read, one at a time
    made = state.split.parameters or state.precision != "float32"
    numels = [numel for numel, _ in layers]
    weights = max((_computed(n, state) for n in numels), default=0) if made else 0
    head = _computed(lives.products, state) if made else 0
    return {
        "loss": moments.loss + head + _stored(lives.products) + accumulated,
        "layers": moments.kept
        + moments.layer
        + (weights or _stored(lives.largest))
        + max(map(_stored, numels), default=0)
        + _total(layers, state.gradient_bytes)
        + _stored(root)  # reduced once the whole of it is there
        + accumulated,
        "update": _update(every, state, gradients),
    }


def _update(every: Sequence[tuple[Numels, int]], state: StateSharding, gradients: int) -> int:
    """Gradients, and their reduced copies; under ZeRO 1 and 2 the pieces of parameters that this
    rank updates, before and after."""
    if not state.fsdp:
        return 2 * gradients if state.shard * state.replicate > 1 else gradients
    if state.split.parameters:
        return gradients
    pieces = sum(
        -(-n // state.shard) * DTYPE_BYTES[kind.dtype] * times
        for numel, times in every
        for kind, n in numel.items()
    )
    return gradients + 2 * pieces


def _total(every: Sequence[tuple[Numels, int]], size: Callable[[int, Kind], int]) -> int:
    return sum(size(n, kind) * times for numel, times in every for kind, n in numel.items())


def _stored(numel: Numels) -> int:
    """Bytes in the dtypes in which the parameters are stored."""
    return sum(n * DTYPE_BYTES[kind.dtype] for kind, n in numel.items())


def _computed(numel: Numels, state: StateSharding) -> int:
    """Bytes in the dtype of compute."""
    narrow = {"float32": state.precision}
    return sum(n * DTYPE_BYTES[narrow.get(k.dtype, k.dtype)] for k, n in numel.items())
