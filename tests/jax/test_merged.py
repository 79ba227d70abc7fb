"""Less may be moved than was priced only by the bytes of equal gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.lowering.collectives import Row
from autopar.runtime.jax.programs import step_alone
from autopar.runtime.verify.collectives import differences
from autopar.runtime.verify.jax.compiled import issued_collectives
from autopar.runtime.verify.jax.joined import APART, joined
from autopar.runtime.verify.jax.merged import Twins, twins, without_merged
from tests.jax import models
from tests.jax.planned import made_of

MESH = {"dp_shard": 2, "tp": 2}
ALIKE = [Twins("blocks.*.down.b", "blocks.*.out.b", 512), Twins("tail.b", "head.b", 96)]


def test_parameters_of_one_gradient_are_found_by_layer() -> None:
    draws = np.random.default_rng(0)
    one, two = draws.normal(size=(2, 32))
    gradients = {
        "blocks.0.out.b": one, "blocks.0.down.b": one * (1 + 1e-15),
        "blocks.1.out.b": two, "blocks.1.down.b": two,
        "blocks.1.up.b": two * (1 + 1e-9), "flat": two.reshape(4, 8),
        "unused": np.zeros(32), "unused too": np.zeros(32),
    }  # fmt: skip
    found = twins(gradients, dict.fromkeys(gradients, 4))
    assert found == [Twins("blocks.*.down.b", "blocks.*.out.b", 2 * 32 * 4)]


def missing(kind: str, size_bytes: int) -> tuple[list[str], tuple[str, ...]]:
    priced = [Row(kind, "tp", 4096, 2), Row("all_gather", "tp", 64, 1)]
    issued = [Row(kind, "tp", 8192 - size_bytes, 1), Row("all_gather", "tp", 64, 1)]
    return without_merged(priced, issued, ALIKE, MESH)


def test_what_is_missing_has_to_be_their_bytes() -> None:
    both = "blocks.*.down.b and blocks.*.out.b"
    assert missing("all_reduce", 0) == ([], ())
    for whole_or_share in (512, 256, 128):
        assert missing("all_reduce", whole_or_share) == ([], (both,))
    assert missing("reduce_scatter", 608) == ([], (both, "tail.b and head.b"))
    for other in (500, 1024, 64, -512):
        lines, pairs = missing("all_reduce", other)
        assert (len(lines), pairs) == (1, ())
    assert len(missing("all_to_all", 512)[0]) == 1


def test_equal_collectives_are_counted_where_xla_leaves_them_apart() -> None:
    priced = [Row("all_reduce", "tp", 64, 3), Row("all_gather", "tp", 32, 1)]
    one_less = [Row("all_reduce", "tp", 64, 2), Row("all_gather", "tp", 32, 1)]
    assert joined(priced, one_less, lambda _: priced) == ("all_reduce over tp, 64 bytes a step",)
    assert joined(priced, one_less, lambda _: one_less) == ()  # the program asks for less
    more_beside = [*one_less, Row("permute", "tp", 8, 1)]
    assert joined(priced, more_beside, lambda _: priced) == ()
    assert joined(priced, priced, lambda _: priced) == ()


def test_what_all_layers_are_given_alike_may_be_moved_once() -> None:
    priced = [
        Row("all_to_all", "cp", 64, 4, "layers::shared0 forward"),
        Row("all_to_all", "cp", 64, 4, "layers::shared0 backward"),
        Row("all_to_all", "cp", 32, 4, "layers::attention forward"),
    ]
    once = [replace(priced[0], count=1), *priced[1:]]
    assert joined(priced, once, lambda _: once) == ("all_to_all over cp, 192 bytes a step",)
    backward_too = [once[0], replace(priced[1], count=1), priced[2]]
    assert joined(priced, backward_too, lambda _: backward_too) == ()
    assert joined(priced, once[:2], lambda _: once[:2]) == ()


def test_a_statistic_that_is_read_twice_is_reduced_once() -> None:
    """Of what two readers want whole XLA makes one sum; the plan has two."""

    def loss(params: Any, batch: Any) -> Any:
        y = batch["x"] @ params["w"]
        mean, square = y.mean(0), jnp.square(y).mean(0)
        size = jnp.sqrt(jnp.maximum(square - mean**2, 0) + 1e-3)
        return jnp.mean(((y - mean) / size) ** 3) + jnp.mean(jnp.sin(mean)) + jnp.mean(size**3)

    shapes = {"w": models.shape(16, 16)}
    program = made_of(
        "statistics", models.Model(loss, shapes, {"x": models.shape(8, 16)}), {"dp_replicate": "8"}
    )
    batch = dict(program.workload.batch(0))
    step, priced = step_alone(program.program(), program.workload), program.priced()
    issued = issued_collectives(step, batch)
    assert differences(priced, issued)
    assert joined(priced, issued, lambda options: issued_collectives(step, batch, options))


def test_gathers_of_one_number_are_counted_where_xla_simplifies_nothing() -> None:
    priced = [Row("all_gather", "cp", 256, 2)]

    def under(options: Mapping[str, str]) -> list[Row]:
        return priced if "algsimp" in options["xla_disable_hlo_passes"] else []

    assert joined(priced, [], under) == ("all_gather over cp, 512 bytes a step",)


def test_what_every_microbatch_moves_alike_is_moved_once() -> None:
    """The first state of a recurrence is no part of the batch: XLA takes its products, and their
    gather, out of the loop over microbatches."""

    def cell(params: Any, x: Any, h: Any) -> Any:
        gate, value = jnp.split(h @ params["state"], 2, axis=-1)
        return jnp.tanh(x @ params["in"] + jax.nn.sigmoid(gate) * value)

    def loss(params: Any, batch: Any) -> Any:
        def one(rows: Any) -> Any:
            h = jnp.full(16, 0.5)
            for x in rows:
                h = cell(params, x, h)
            return h

        return jnp.mean(jnp.square(jax.vmap(one)(batch["x"])))

    shapes = {"in": models.shape(16, 16), "state": models.shape(16, 32)}
    model = models.Model(loss, shapes, {"x": models.shape(8, 2, 16)})
    fix = {"dp_replicate": "2", "tp": "4", "microbatch": "2"}
    program = made_of("microbatches alike", model, fix)
    batch = dict(program.workload.batch(0))
    step, priced = step_alone(program.program(), program.workload), program.priced()
    issued = issued_collectives(step, batch)
    apart = issued_collectives(step, batch, APART)
    assert not differences(priced, apart)
    assert differences(priced, issued)
    assert joined(priced, issued, lambda _: apart)


@pytest.mark.parametrize("recompute", ["none", "compute", "full"])
def test_what_layers_gather_of_samples_is_kept_where_parameters_are_not(recompute: str) -> None:
    """Under ZeRO 3 both are gathered over one axis; samples again under full recompute alone."""

    def loss(params: Any, batch: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            near = jnp.tanh(x @ p["w"] @ x.T)
            return x + jnp.tanh(near @ x), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, batch["x"], params)[0]))

    shapes = {"w": models.shape(3, 16, 16)}
    model = models.Model(loss, shapes, {"x": models.shape(16, 16)})
    fix = {"dp_shard": "8", "zero": "3", "recompute": recompute}
    program = made_of(f"samples meet, {recompute}", model, fix)
    step, priced = step_alone(program.program(), program.workload), program.priced()
    assert any(row.axis == "dp_shard" and row.kind == "all_gather" for row in priced)
    batch = dict(program.workload.batch(0))
    assert not differences(priced, issued_collectives(step, batch, APART))
