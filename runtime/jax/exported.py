"""What makes the random numbers of a step, as a file that programs read without autopar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import export

from autopar.frontends.jax import is_key
from autopar.frontends.jax.draws import Draws
from autopar.runtime.jax.own_loss import key_kinds


def exported(draws: Draws) -> bytes:
    """A function of the bits of the keys and of what is counted, for CPUs, GPUs and TPUs."""

    def draw(bits: Mapping[str, Any]) -> dict[str, Any]:
        return draws.draw({name: _key(x, draws.batch[name]) for name, x in bits.items()})

    counted = () if draws.counts is None else draws.counts.entries
    given = {name: draws.batch[name] for name in (*draws.keys, *counted)}
    shapes = {name: jax.eval_shape(_bits, array) for name, array in given.items()}
    made = export.export(jax.jit(draw), platforms=("cpu", "cuda", "tpu"))(shapes)
    return bytes(made.serialize())


def _bits(key: Any) -> Any:
    return jax.random.key_data(key) if is_key(key) else key


def _key(bits: Any, like: Any) -> Any:
    """The inverse, of keys as ``like`` has them."""
    if not is_key(like):
        return bits
    return jax.random.wrap_key_data(bits, impl=key_kinds()[like.dtype])
