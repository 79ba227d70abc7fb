"""Attention of rows and around a ring, on virtual devices, against that of one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from autopar.runtime.jax.parallel.attention_rows import attention
from autopar.runtime.jax.parallel.ring_attention import ring_attention
from autopar.runtime.jax.parallel.zigzag import from_zigzag, to_zigzag, zigzag_places

B, H, G, S, D = 2, 4, 2, 24, 8
P: Any = PartitionSpec
AXES = {"one": ("a",), "two": ("a", "b")}


def masks() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    some = rng.random((B, 1, S, S)) > 0.4
    some[:, :, 5] = False  # a row that sees nothing
    some[:, :, 9, :8] = False  # one that sees nothing of early pieces
    return {
        "none": None,
        "rows": jnp.asarray(some),
        "keys": jnp.asarray(rng.random((B, 1, 1, S)) > 0.3),
        "added": jnp.asarray(np.where(rng.random((1, H, S, S)) > 0.2, 0.5, -np.inf)),
    }


def split(function: Any, mask: Any, axes: tuple[str, ...], order: str) -> Any:
    """``function(q, k, v, mask)`` of whole arrays in natural order, run on pieces."""
    mesh: Any = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    ways = 2 ** len(axes)
    spec = P(None, None, axes)
    of_mask = P(None, None, axes if mask is not None and mask.shape[2] > 1 else None)
    turned: Any = partial(to_zigzag, dim=2, ways=ways) if order == "zigzag" else lambda x: x

    def run(q: Any, k: Any, v: Any) -> Any:
        given = [turned(x) for x in (q, k, v)]
        rows = mask if mask is None or mask.shape[2] == 1 else turned(mask)
        specs = (spec, spec, spec, *(() if mask is None else (of_mask,)))
        pieces = jax.shard_map(
            lambda q, k, v, *mask: function(q, k, v, *mask),
            mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False,
        )  # fmt: skip
        made = pieces(*given, *(() if mask is None else (rows,)))
        return from_zigzag(made, 2, ways) if order == "zigzag" else made

    return run


def gathered(axes: tuple[str, ...], causal: bool, order: str, window: int | None = None) -> Any:
    def function(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        ways = jax.lax.axis_size(axes)
        whole = [jax.lax.all_gather(x, axes, axis=2, tiled=True) for x in (k, v)]
        whole = [from_zigzag(x, 2, ways) for x in whole] if order == "zigzag" else whole
        rows = axes if causal else ()
        return attention(q, whole[0], whole[1], mask, causal, 0.3, rows, order, window)

    return function


def around(axes: tuple[str, ...], causal: bool, order: str, window: int | None = None) -> Any:
    return partial(ring_attention, causal=causal, scale=0.3, ring=axes, order=order, window=window)


CASES = [
    (around, "one", True, "contiguous", "none"), (around, "two", True, "contiguous", "none"),
    (around, "one", True, "zigzag", "none"), (around, "two", True, "zigzag", "none"),
    (around, "two", False, "contiguous", "none"), (around, "two", False, "contiguous", "rows"),
    (around, "two", True, "zigzag", "rows"), (around, "one", True, "contiguous", "rows"),
    (around, "two", True, "zigzag", "added"), (around, "two", False, "contiguous", "keys"),
    (gathered, "two", True, "contiguous", "none"), (gathered, "two", True, "zigzag", "rows"),
]  # fmt: skip
WINDOWS = [
    (around, "one", "contiguous", "none", 5), (around, "two", "contiguous", "none", 1),
    (around, "two", "contiguous", "none", 4), (around, "two", "contiguous", "rows", 13),
    (around, "two", "contiguous", "none", 14), (around, "two", "zigzag", "none", 5),
    (around, "two", "zigzag", "added", 15), (gathered, "two", "contiguous", "keys", 7),
    (gathered, "two", "zigzag", "none", 7),
]  # fmt: skip


@pytest.mark.parametrize(
    ("way", "axes", "causal", "order", "mask", "window"),
    [(*case, None) for case in CASES]
    + [(way, axes, True, order, mask, window) for way, axes, order, mask, window in WINDOWS],
)
@pytest.mark.some(9)
def test_values_and_gradients_are_those_of_one_device(
    way: Any, axes: str, causal: bool, order: str, mask: str, window: int | None
) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.normal(size=(B, n, S, D))) for n in (H, G, G))
        weights = jnp.asarray(rng.normal(size=q.shape))
        given = masks()[mask]
        ours = split(way(AXES[axes], causal, order, window), given, AXES[axes], order)

        def one(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, given, causal=causal, scale=0.3, window=window)

        def both(function: Any) -> Any:
            def total(*given: Any) -> Any:
                return (weights * function(*given)).sum()

            return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(q, k, v)

        pairs = zip(jax.tree.leaves(both(ours)), jax.tree.leaves(both(one)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("order", "window", "shifts"), [
    ("zigzag", None, 2 + 1),  # inside along b, then a step along a
    ("zigzag", 2, 2 + 1),
    ("contiguous", 14, 2 + 1),  # a row sees the piece two before its own
    ("contiguous", 2, 2 + 1),  # and the one before, which comes along a to every second device
    ("contiguous", 1, 1),
])  # fmt: skip
def test_forward_and_backward_send_as_often_as_their_docstring_says(
    order: str, window: int | None, shifts: int
) -> None:
    x = jax.ShapeDtypeStruct((B, H, S, D), jnp.float32)
    run = split(around(("a", "b"), True, order, window), None, ("a", "b"), order)
    text = jax.jit(jax.grad(lambda q, k, v: run(q, k, v).sum(), (0, 1, 2))).lower(x, x, x).as_text()
    assert (
        text.count("collective_permute") == 2 * 3 * shifts
    )  # each array there, back, its gradient


def test_places_in_zigzag() -> None:
    assert zigzag_places(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    x = np.arange(24).reshape(2, 12)
    np.testing.assert_array_equal(to_zigzag(x, 1, 3), x[:, zigzag_places(12, 3)])
    np.testing.assert_array_equal(from_zigzag(to_zigzag(x, 1, 3), 1, 3), x)
    with pytest.raises(ValueError, match="take a length that 8 divides"):
        zigzag_places(12, 4)
