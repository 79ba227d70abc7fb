"""The exported PartitionSpecs run: one step under virtual devices is the step of one device."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from autopar.emit.exports import partition_specs
from autopar.frontends.loading import load_workload
from tests.emit.exports.setups import ROOT, gpt

EXAMPLE = "05_gpt_jax.py"


def module(zero: int) -> Any:
    made = partition_specs.export(gpt(EXAMPLE, zero))
    namespace = types.ModuleType("autopar_specs")
    exec(compile(made.files["autopar_specs.py"], "autopar_specs.py", "exec"), namespace.__dict__)
    return namespace


@cache
def one_device() -> tuple[Any, Any, Any, Any, Any]:
    """The step, what it is called with, and what one device makes of it."""
    workload = load_workload(str(ROOT / "examples" / EXAMPLE))
    assert workload.init is not None
    assert workload.loss is not None
    loss_of = workload.loss
    params = jax.jit(workload.init)(jax.random.key(0))
    batch = {name: jnp.asarray(value) for name, value in workload.batch().items()}

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    expected, loss = jax.jit(step)(params, batch)
    return step, params, batch, expected, loss


@pytest.mark.parametrize("zero", [1, 3])
def test_a_step_is_that_of_one_device(zero: int) -> None:
    specs = module(zero)
    step, params, batch, expected, loss = one_device()
    mesh = specs.mesh(jax.devices()[:4])

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree)

    where = placed(specs.parameter_specs(params))
    split = jax.jit(step, in_shardings=(where, placed(specs.BATCH)), out_shardings=(where, None))
    updated, split_loss = split(jax.device_put(params, where), batch)
    np.testing.assert_allclose(split_loss, loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(updated), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
    up = updated["blocks"]["up"]["weight"]  # [layers, 4 x width, width], columns over tp
    layers, rows, width = up.shape
    local = up.sharding.shard_shape(up.shape)
    assert local == (layers, rows // (4 if zero == 3 else 2), width)
    state = placed(specs.state_specs(params))["blocks"]["up"]["weight"]
    assert state.shard_shape(up.shape) == (layers, rows // (4 if zero else 2), width)


def test_activations_are_constrained() -> None:
    specs = module(3)
    mesh = specs.mesh(jax.devices()[:4])
    x = jnp.zeros((16, 128, 128))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: specs.constrain("blocks::x", x))(x)
    assert y.sharding.shard_shape(y.shape) == (8, 64, 128)


def test_a_tree_that_is_not_the_models_is_told() -> None:
    with pytest.raises(KeyError, match=r"blocks\.down\.weights is no parameter of the plan"):
        module(0).parameter_specs({"blocks": {"down": {"weights": jnp.zeros(2)}}})
