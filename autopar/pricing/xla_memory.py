"""Memory of a JAX program on one device, as XLA lays it out for the compiled step.

A step's arguments (parameters, optimizer state, batch) are there all the time; its temporary arrays
are one allocation as large as the worst moment of the step::

    loss      what all layers keep + the root's tensors and their gradients, logits among them
    layers    what all layers keep + gradients (of the root whole, unless the compiler reduces each
              right behind its product) + one layer's tensors, weights and gradients
    update    gradients, before and after they are reduced + the pieces that the optimizer makes

The layers of a block are a loop, so what they keep is stacked arrays that are there until it ends;
what that is says `xla_lives`. A stage of a pipeline is several calls, and what is kept of a
microbatch is an argument of the one that goes back: it is there until that ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.recompute import Recompute
from autopar.pricing.state import StateSharding
from autopar.pricing.units.unit import Kind
from autopar.pricing.xla_lives import XlaLives

Numels = Mapping[Kind, int]
"""Elements by kind."""


def xla_moments(
    lives: XlaLives,
    recompute: Recompute,
    state: StateSharding,
    root: Numels,
    layers: Sequence[tuple[Numels, int]],
    alone: bool = True,
) -> dict[str, int]:
    """Bytes of temporary arrays at each moment of a step.

    root and layers: trained parameters on one model rank, outside of blocks and of one layer of
    each block with the number of layers. alone: whether they are the whole model.
    """
    moments = lives.by_policy[recompute.policy]
    every = [(root, 1), *layers]
    gradients = _total(every, state.gradient_bytes)
    accumulated = gradients if state.microbatches > 1 else 0
    # weights that are no arguments: gathered, or in another dtype. Else a layer's are cut off the
    # stack when they are read, one at a time
    made = state.split.parameters or state.precision != "float32"
    numels = [numel for numel, times in layers if times > 1]  # one layer is no stack
    weights = max((_computed(n, state) for n in numels), default=0) if made else 0
    cut = _stored(lives.largest) if numels else 0
    # a product turns the gradient that came, in the place of what is kept where that can go
    turned = 0 if alone else lives.given
    head = _computed(lives.products, state) if made else 0
    # a stage's gradients are reduced at its end
    eager = lives.is_eager and alone and not (lives.hoists and state.microbatches > 1)
    product = partial(_reduced, state=state) if eager else _stored
    return {
        "loss": moments.loss + turned + head + product(lives.products) + accumulated,
        "layers": moments.kept
        + moments.layer
        + (weights or cut)
        + max(map(product, numels), default=0)
        + _total(layers, state.gradient_bytes)
        + (_total([(root, 1)], state.gradient_bytes) if eager else _stored(root))
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


def _reduced(numel: Numels, state: StateSharding) -> int:
    """Bytes in the dtypes in which gradients are reduced, of those that are so at once."""
    return sum(n * DTYPE_BYTES[state.reduced_dtype(kind.dtype)] for kind, n in numel.items())


def _computed(numel: Numels, state: StateSharding) -> int:
    """Bytes in the dtype of compute."""
    narrow = {"float32": state.precision}
    return sum(n * DTYPE_BYTES[narrow.get(k.dtype, k.dtype)] for k, n in numel.items())
