"""The cases of `autopar profile` in JAX, compiled: what emitted programs call.

XLA makes one loop of ops that work place by place, and what it has at hand it does not write.
Prices count that (`autopar.rules.fusion`); so a figure here is that of an op by itself: between two
calls of a chain stands a barrier that the compiler does not look through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.runtime.jax.parallel.attention_rows import attention
from autopar.runtime.jax.parallel.ops import (
    conv,
    cross_entropy,
    embedding,
    layer_norm,
    linear,
    rms_norm,
)
from autopar.runtime.profile.cases import CHAIN_BYTES, Case
from autopar.runtime.profile.jax.bench import Bench

Array = Any
Call = Callable[..., Array]

CALLS: Mapping[str, Callable[[Case], Call]] = {
    "linear": lambda case: linear,
    "attention": lambda case: partial(attention, causal=case.attrs["causal"]),
    "add": lambda case: lambda x, _: x + x,
    "bias": lambda case: jnp.add,
    "mul": lambda case: jnp.multiply,
    "gelu": lambda case: partial(jax.nn.gelu, approximate=False),
    "silu": lambda case: jax.nn.silu,
    "relu": lambda case: jax.nn.relu,
    "softmax": lambda case: partial(jax.nn.softmax, axis=-1),
    "layer_norm": lambda case: layer_norm,
    "rms_norm": lambda case: rms_norm,
    "embedding": lambda case: embedding,
    "cross_entropy": lambda case: lambda logits, labels: cross_entropy(logits, labels).reshape(1),
    "conv": lambda case: partial(conv, padding=[(p, p) for p in case.attrs["padding"]]),
}
"""By what is called; graphs of JAX have no other kinds of the cases."""


LONGEST = 6
"""Calls of a chain: a compiled function takes no time between two, and time to compile."""


class Chain:
    """A case with its operands on every device: `forward` of these, `backward` of what it made."""

    def __init__(
        self, case: Case, dtype: str, bench: Bench, chain_bytes: float = CHAIN_BYTES
    ) -> None:
        """``chain_bytes``: what the forward of the chain touches on a device."""
        self.calls = case.calls(dtype, chain_bytes, LONGEST)
        call, rng = CALLS[case.called](case), np.random.default_rng(0)
        lanes = 1 if case.chained else self.calls
        make = partial(_operand, case, dtype, bench, rng)
        firsts = [make(0) for _ in range(lanes)]
        others = [[make(i) for i in range(1, len(case.operands))] for _ in range(self.calls)]
        self.operands = (firsts, others)

        def results(firsts: list[Array], others: list[list[Array]]) -> list[Array]:
            if not case.chained:
                return [call(x, *own) for x, own in zip(firsts, others, strict=True)]
            x = firsts[0]
            for own in others:
                x = lax.optimization_barrier(call(x, *own))
            return [x]

        kept: list[Any] = []

        def forward(firsts: list[Array], others: list[list[Array]]) -> Any:
            """What is made, and what is kept of it for backward."""
            floats, counted = _apart(firsts, others, case)
            made, pull = jax.vjp(lambda given: results(*_joined(given, counted)), floats)
            leaves, tree = jax.tree.flatten(pull)
            kept[:] = [tree]
            return made, [jnp.asarray(leaf)[None] for leaf in leaves]

        def backward(made: list[Array], leaves: list[Array]) -> Any:
            pull = jax.tree.unflatten(kept[0], [leaf[0] for leaf in leaves])
            return pull([jnp.ones_like(x) for x in made])

        self.forward, self.backward = bench.on_each(forward), bench.on_each(backward)
        self.made = self.forward(*self.operands)


def _operand(
    case: Case, dtype: str, bench: Bench, rng: np.random.Generator, position: int
) -> Array:
    shape = case.operands[position]
    if position in case.below:
        return bench.each(rng.integers(0, case.below[position], shape, dtype=np.int32))
    # Positive, and scaled so that a chain neither vanishes into denormal numbers nor overflows.
    made = (rng.random(shape, dtype=np.float32) + 0.5) / case.over(position)
    return bench.each(made.astype(jnp.dtype(dtype)))


def _apart(firsts: list[Array], others: list[list[Array]], case: Case) -> tuple[Any, Any]:
    """What has gradients, and the rest, each by its place."""
    floats: dict[tuple[int, int], Array] = {}
    rest: dict[tuple[int, int], Array] = {}
    for n, x in enumerate(firsts):
        (rest if 0 in case.below else floats)[n, 0] = x
    for n, own in enumerate(others):
        for i, x in enumerate(own, 1):
            (floats if i in case.trained else rest)[n, i] = x
    return floats, rest


def _joined(floats: Any, rest: Any) -> tuple[list[Array], list[list[Array]]]:
    every = {**floats, **rest}
    firsts = [every[place] for place in sorted(every) if place[1] == 0]
    calls = 1 + max(n for n, _ in every)
    return firsts, [[every[p] for p in sorted(every) if p[0] == n and p[1]] for n in range(calls)]


class Update:
    """One step of AdamW on ``elements`` parameters of every device, in one loop as XLA makes it."""

    def __init__(self, elements: int, bench: Bench) -> None:
        rng = np.random.default_rng(0)
        self.operands = tuple(bench.each(rng.random(elements, dtype=np.float32)) for _ in range(4))

        def step(weight: Array, gradient: Array, first: Array, second: Array) -> Any:
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient * gradient
            moved = 1e-4 * first / (jnp.sqrt(second) + 1e-8)
            return weight * (1 - 1e-6) - moved, first, second

        self.step = bench.on_each(step)
