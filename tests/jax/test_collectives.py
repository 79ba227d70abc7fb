"""Each collective against its definition on four ranks, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from autopar.lowering.collectives import Row
from autopar.runtime.jax.parallel import collectives
from autopar.runtime.verify.jax import counting

RANKS = 4
Pieces = np.ndarray  # one row a rank


def total(x: Pieces) -> Pieces:
    return np.stack([x.sum(0)] * RANKS)


def same(x: Pieces) -> Pieces:
    return x


def joined(x: Pieces, dim: int) -> Pieces:
    return np.stack([np.concatenate(list(x), axis=dim)] * RANKS)


def pieces(x: Pieces, dim: int) -> Pieces:
    return np.stack([np.split(row, RANKS, axis=dim)[i] for i, row in enumerate(x)])


def around(x: Pieces, dim: int) -> Pieces:
    zero = np.zeros_like(x[0])
    rows = [[row if i == j else zero for j in range(RANKS)] for i, row in enumerate(x)]
    return np.stack([np.concatenate(row, axis=dim) for row in rows])


def first(x: Pieces) -> Pieces:
    return np.stack([row if i == 0 else np.zeros_like(row) for i, row in enumerate(x)])


def exchanged(x: Pieces, split: int, concat: int) -> Pieces:
    whole = np.concatenate(list(x), axis=concat)
    return np.stack(np.split(whole, RANKS, axis=split))


Way = Callable[[Pieces], Pieces]
CASES: dict[str, tuple[Callable[[Any], Any], Way, Way, set[str]]] = {
    "all_reduce": (lambda x: collectives.all_reduce(x, "a"), total, same, {"all_reduce"}),
    "copy_to": (lambda x: collectives.copy_to(x, "a"), same, total, {"all_reduce"}),
    "reduce_scatter": (
        lambda x: collectives.reduce_scatter(x, 1, "a"),
        lambda x: pieces(total(x), 1),
        lambda g: joined(g, 1),
        {"reduce_scatter", "all_gather"},
    ),
    "gather_slice": (
        lambda x: collectives.gather(x, 0, "a", backward="slice"),
        lambda x: joined(x, 0),
        lambda g: pieces(g, 0),
        {"all_gather"},
    ),
    "gather_reduce_scatter": (
        lambda x: collectives.gather(x, 1, "a", backward="reduce_scatter"),
        lambda x: joined(x, 1),
        lambda g: pieces(total(g), 1),
        {"all_gather", "reduce_scatter"},
    ),
    "shard_all_gather": (
        lambda x: collectives.shard(x, 0, "a", backward="all_gather"),
        lambda x: pieces(x, 0),
        lambda g: joined(g, 0),
        {"all_gather"},
    ),
    "shard_pad": (
        lambda x: collectives.shard(x, 1, "a", backward="pad"),
        lambda x: pieces(x, 1),
        lambda g: around(g, 1),
        set(),
    ),
    "all_to_all": (
        lambda x: collectives.all_to_all(x, split=1, concat=0, axis="a"),
        partial(exchanged, split=1, concat=0),
        partial(exchanged, split=0, concat=1),
        {"all_to_all"},
    ),
    "pad": (
        lambda x: collectives.pad(x, 0, "a"),
        lambda x: around(x, 0),
        lambda g: pieces(g, 0),
        set(),
    ),
    "keep_first": (lambda x: collectives.keep_first(x, "a"), first, same, set()),
    "keep_first_both": (
        lambda x: collectives.keep_first(x, "a", backward="keep_first"),
        first,
        first,
        set(),
    ),
    "whole": (lambda x: collectives.whole(x, "a"), same, first, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_collective(name: str) -> None:
    function, forward, backward, kinds = CASES[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(RANKS, 8, 12)).astype(np.float32)
    gradient = rng.normal(size=forward(x).shape).astype(np.float32)

    def both(x: Any, g: Any) -> Any:
        y, back = jax.vjp(function, x[0])
        return y[None], back(g[0])[0][None]

    mesh = jax.make_mesh((2, RANKS), ("b", "a"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("a")
    run = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=(spec,) * 2, out_specs=spec, check_vma=False)
    )
    y, back = run(x, gradient)
    np.testing.assert_allclose(y, forward(x), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(back, backward(gradient), rtol=1e-6, atol=1e-6)
    rows = counting.collectives(run.lower(x, gradient).compile().as_text(), {"b": 2, "a": RANKS})
    assert {row.kind for row in rows} == kinds
    assert {row.axis for row in rows} <= {"a"}


def test_collectives_in_loops_count_as_often_as_they_run() -> None:
    mesh = jax.make_mesh((2, 4), ("b", "a"), axis_types=(AxisType.Auto,) * 2)

    def inner(x: Any, _: Any) -> Any:
        return jnp.tanh(jax.lax.psum(x, "b")), None

    def outer(x: Any, _: Any) -> Any:
        x, _ = jax.lax.scan(inner, x, length=3)
        return jax.lax.psum(x, ("b", "a")) / 8, None

    def run(x: Any) -> Any:
        return jax.lax.all_gather(jax.lax.scan(outer, x, length=5)[0], "a", tiled=True)

    spec = PartitionSpec(None)
    local = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(local).lower(jnp.ones((16, 3))).compile().as_text()
    assert counting.collectives(text, {"b": 2, "a": 4}) == [
        Row("all_gather", "a", 4 * 16 * 3 * 4, 1),
        Row("all_reduce", "b", 16 * 3 * 4, 15),
        Row("all_reduce", "b+a", 16 * 3 * 4, 5),
    ]


def test_bfloat16_counts_as_bfloat16_and_float32_as_float32() -> None:
    """XLA widens the first on CPUs; the second is what a program asks for that casts too early."""

    def run(x: Any, w: Any) -> Any:
        narrow = jax.lax.psum(x @ w, "a")
        wide = jax.lax.all_gather((x @ w).astype(jnp.float32), "a", tiled=True)
        return narrow.astype(jnp.float32).sum() + wide.sum()

    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    spec = PartitionSpec()
    local = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 2, out_specs=spec, check_vma=False)
    lowered = jax.jit(local).lower(jnp.ones((8, 3), "bfloat16"), jnp.ones((3, 5), "bfloat16"))
    counting.mark_asked_dtypes(lowered.compiler_ir("stablehlo").operation)
    assert counting.collectives(lowered.compile().as_text(), {"a": 4}) == [
        Row("all_gather", "a", 4 * 8 * 5 * 4, 1),
        Row("all_reduce", "a", 8 * 5 * 2, 1),
    ]


def test_groups_written_as_iota() -> None:
    text = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %a = f32[8]{0} all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %b = (f32[2]{0}, f32[8]{0}) all-gather-start(%a), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %c = f32[8]{0} all-gather-done(%b)
}
"""
    assert counting.collectives(text, {"b": 2, "a": 4}) == [
        Row("all_gather", "a", 32, 1),
        Row("all_reduce", "b", 32, 1),
    ]
