"""A sample of the calls of `tests.jax.lax_ops`: what was wrong, or could not run, when all were run
for the first time, and what meets ties."""

from __future__ import annotations

import pytest

from tests.jax.lax_ops import outcomes

MENDED = (
    "~n",
    "lax.reduce_and of ints",
    "lax.reshape in another order",
    "jnp.convolve",
)
TIES = ("jnp.clip(x, -1, 1)", "at.max of a row")


@pytest.mark.parametrize("name", [*MENDED, *TIES])
def test_it_is_captured_and_its_program_is_exact(name: str) -> None:
    rows = [r for r in outcomes(("by hand",), (name,), programs=1) if r.name == name]
    assert rows
    assert {row.outcome for row in rows} == {"right"}, rows


def test_a_loss_that_no_sample_is_in() -> None:
    rows = list(outcomes(("public",), ("jnp.iscomplex",), programs=1))
    assert {row.outcome for row in rows if row.name == "jnp.iscomplex(x)"} == {"right"}, rows
