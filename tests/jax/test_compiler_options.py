"""XLA knows every option that programs are compiled with, on whatever platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.runtime.jax.parallel.part import COMPILER_OPTIONS


@pytest.mark.parametrize("platform", COMPILER_OPTIONS)
def test_they_are_known(platform: str) -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(2))
    assert lowered.compile(compiler_options=dict(COMPILER_OPTIONS[platform]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options={"xla_none_has_this_name": True})
