"""What the loss asks for and the plan decides is told with its place."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from autopar.frontends.jax import capture
from tests.jax.models import shape

PARAMS = {"w": shape(8, 8)}
BATCH = {"x": shape(4, 8)}
POLICIES = jax.checkpoint_policies


def notes(function: Any, precision: str = "float32") -> tuple[str, ...]:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(function(batch["x"] @ params["w"]).astype(jnp.float32))

    return capture(loss, PARAMS, BATCH, precision=precision).notes


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (None, r"jax\.checkpoint at"),
        (POLICIES.dots_saveable, "DotsSaveable|dots_saveable"),
        (POLICIES.save_only_these_names("h"), "(?i)save_?only_?these_?names"),
    ],
)
def test_a_checkpoint_is_told_with_its_policy(policy: Any, name: str) -> None:
    @partial(jax.checkpoint, policy=policy)
    def function(x: Any) -> Any:
        return jnp.sin(checkpoint_name(jnp.cos(x), "h"))

    (note,) = notes(function)
    assert "test_remarks.py:" in note
    assert "is left out" in note
    assert re.search(name, note)


def test_a_checkpoint_that_a_scan_calls_is_told_with_the_place_of_its_body() -> None:
    @partial(jax.checkpoint, policy=POLICIES.dots_saveable)
    def body(x: Any, _: Any) -> tuple[Any, None]:
        return jnp.sin(x), None

    (note,) = notes(lambda x: jax.lax.scan(body, x, None, length=3)[0])
    assert "test_remarks.py:" in note


def test_a_sharding_constraint_is_told_with_its_spec() -> None:
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    where = NamedSharding(mesh, PartitionSpec("model"))
    (note,) = notes(lambda x: jax.lax.with_sharding_constraint(jnp.tanh(x), where))
    assert "test_remarks.py:" in note
    assert "'model'" in note


def test_casts_that_cannot_be_followed_are_told() -> None:
    """Of a loss that is another program in half precision; the user's own casts, not those that
    functions of JAX make for themselves."""

    def other(x: Any) -> Any:
        y = jax.nn.softmax(x.astype(jnp.float32))
        return jnp.sin(y) if x.dtype == jnp.bfloat16 else y

    own = notes(other, "bfloat16")
    assert len(own) == 1
    assert own[0].count("test_remarks.py:") == 1  # what the loss casts then is float32 already
    assert "plan with precision float32" in own[0]
    assert notes(other) == ()
    for followed in (jax.nn.softmax, lambda x: jax.nn.softmax(x.astype(jnp.float32))):
        assert notes(followed, "bfloat16") == ()
    assert notes(lambda x: x.astype(jnp.bfloat16)) == ()
