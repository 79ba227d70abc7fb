"""The attention of emitted programs: its numbers against the definition, and what it keeps."""

from __future__ import annotations

import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autopar.runtime.jax.parallel import attention_kernels, make_mesh
from autopar.runtime.jax.parallel.attention_kernels import (
    by_cudnn,
    by_splash,
    kernel_for,
    platform,
)
from autopar.runtime.jax.parallel.attention_rows import attention

B, H, S, D = 2, 4, 150, 8  # two blocks of rows and 22 rows more


def by_definition(
    q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float, seen: int | None = None
) -> Any:
    """Each query head by itself, keys and values repeated. ``seen``: how wide a window is."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("bhsd,bhtd->bhst", q, k) * scale
    if mask is not None and mask.dtype == jnp.bool_:
        scores = jnp.where(mask, scores, -1e300)
    elif mask is not None:
        scores = scores + mask
    if causal:
        back = np.arange(q.shape[2])[:, None] - np.arange(k.shape[2])
        shown = (back >= 0) & (back < (k.shape[2] if seen is None else seen))
        scores = jnp.where(shown, scores, -1e300)
    return jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(scores), v)


def window(width: int) -> Any:
    away = np.arange(S)[:, None] - np.arange(S)
    return jnp.asarray((away >= 0) & (away < width))[None, None]


def bias(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(7).normal(size=shape))


def one_row_without_keys() -> Any:
    rows = np.random.default_rng(3).random((B, 1, S, S)) > 0.3
    rows[0, 0, 17] = False
    return jnp.asarray(rows)


MASKS = {
    "none": lambda: None,
    "padding": lambda: jnp.asarray(np.random.default_rng(1).random((B, 1, 1, S)) > 0.2),
    "a row without keys": one_row_without_keys,
    "sliding window": lambda: window(9),
    "bias by head": lambda: bias(1, H, S, S),
    "bias by key": lambda: bias(B, 1, 1, S),
}


@pytest.mark.parametrize(
    ("mask", "causal", "groups"),
    [
        ("none", True, 2), ("none", False, 4), ("padding", True, 4), ("sliding window", False, 2),
        ("a row without keys", False, 1), ("bias by head", True, 2), ("bias by key", False, 4),
    ],
)  # fmt: skip
def test_values_and_gradients_in_float64(mask: str, causal: bool, groups: int) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.normal(size=(B, n, S, D))) for n in (H, groups, groups))
        given = cast(Any, MASKS[mask])()
        biased = given is not None and given.dtype != jnp.bool_
        weights = jnp.asarray(rng.normal(size=q.shape))

        def total(function: Any, *inputs: Any) -> Any:
            tail = inputs[3] if biased else given
            return (weights * function(*inputs[:3], tail, causal, 0.3)).sum()

        inputs = (q, k, v, *((given,) if biased else ()))
        places = tuple(range(len(inputs)))
        ours = jax.jit(jax.value_and_grad(lambda *a: total(attention, *a), places))(*inputs)
        right = jax.jit(jax.value_and_grad(lambda *a: total(by_definition, *a), places))(*inputs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
        assert np.abs(a - b).max() <= 1e-12 * np.abs(b).max()


def shapes(causal: bool = True) -> Any:
    x = jax.ShapeDtypeStruct((1, 8, 2048, 32), jnp.float32)
    return lambda q, k, v: attention(q, k, v, causal=causal), (x, x, x)


def test_no_scores_are_kept() -> None:
    function, given = shapes()
    kept = jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], *given)
    sizes = [leaf.size for leaf in jax.tree.leaves(kept)]
    assert 0 < max(sizes) <= given[0].size


def test_no_scores_are_there_at_once() -> None:
    """8 x 2048 x 2048 scores are 134 MB; every array of the compiled gradient is smaller."""
    function, given = shapes()
    gradient = jax.grad(lambda *a: function(*a).sum(), (0, 1, 2))
    memory = jax.jit(gradient).lower(*given).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 2048 * 2048 * 4 / 5


def test_a_mask_that_no_gradient_reaches_has_none() -> None:
    """A gradient of a mask of positions is neither kept nor made."""
    x = jax.ShapeDtypeStruct((1, 2, 1024, 16), jnp.float32)

    def total(q: Any, k: Any, v: Any) -> Any:
        away = jnp.arange(1024)[:, None] - jnp.arange(1024)
        slopes = jnp.asarray([0.5, 0.25], jnp.float32)[:, None, None]
        return attention(q, k, v, (slopes * -abs(away))[None]).sum()

    memory = jax.jit(jax.grad(total, (0, 1, 2))).lower(x, x, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.5 * (2 * 1024 * 1024 * 4)


@pytest.mark.parametrize(
    ("dtype", "s", "d", "capability", "device", "expected"),
    [
        ("bfloat16", 128, 64, "9.0", "gpu", by_cudnn),
        ("float16", 128, 128, "8.0", "gpu", by_cudnn),
        ("float32", 128, 64, "9.0", "gpu", None), ("bfloat16", 128, 192, "9.0", "gpu", None),
        ("bfloat16", 128, 60, "9.0", "gpu", None), ("bfloat16", 128, 64, "7.5", "gpu", None),
        ("bfloat16", 128, 64, "", "tpu", by_splash), ("bfloat16", 100, 64, "", "tpu", None),
        ("float32", 128, 64, "", "tpu", None), ("bfloat16", 128, 64, "9.0", "cpu", None),
    ],
)  # fmt: skip
def test_which_device_has_a_kernel(
    dtype: str, s: int, d: int, capability: str, device: str, expected: Any, monkeypatch: Any
) -> None:
    class Device:
        compute_capability = capability

    monkeypatch.setattr(attention_kernels, "platform", lambda: device)
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    q = jax.ShapeDtypeStruct((1, 2, s, d), dtype)
    assert kernel_for(q, q) is expected


def test_the_platform_is_that_of_the_mesh(monkeypatch: Any) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert platform() == "tpu"
    mesh = make_mesh(tp=1)
    seen: list[str] = []

    def here(x: Any) -> Any:
        seen.append(platform())
        return x

    on_mesh = jax.shard_map(here, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    jax.eval_shape(on_mesh, jnp.zeros(1))
    assert seen == ["cpu"]


@pytest.mark.parametrize(("mask", "width"), [
    ("none", 1), ("none", 9), ("none", 80), ("none", 149), ("padding", 40), ("bias by head", 70),
    ("bias by key", 70), ("sliding window", 12),
])  # fmt: skip
@pytest.mark.some(4)
def test_a_window(mask: str, width: int) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v, g = (jnp.asarray(rng.normal(size=(B, n, S, D))) for n in (H, 2, 2, H))
        given = cast(Any, MASKS[mask])()
        biases = () if given is None or given.dtype == jnp.bool_ else (given,)

        def ours(q: Any, k: Any, v: Any, *bias: Any) -> Any:
            own = bias[0] if bias else given
            return attention(q, k, v, own, causal=True, scale=0.3, window=width)

        def definition(q: Any, k: Any, v: Any, *bias: Any) -> Any:
            return by_definition(q, k, v, bias[0] if bias else given, True, 0.3, width)

        pairs = [jax.vjp(f, q, k, v, *biases) for f in (ours, definition)]
        (made, pull), (right, own) = pairs
        for one, other in zip((made, *pull(g)), (right, *own(g)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


def test_a_window_makes_the_scores_that_show_alone() -> None:
    x = jax.ShapeDtypeStruct((1, 1, 4096, 16), jnp.float32)

    def flops(**seen: Any) -> float:
        made = jax.jit(lambda q, k, v: attention(q, k, v, causal=True, **seen)).lower(x, x, x)
        text = made.as_text()
        return max(int(n) for n in re.findall(r"tensor<1x1x1x\d+x(\d+)xf32>", text))

    assert flops() == 4096  # columns of a block of rows
    assert flops(window=128) == 128 + 127


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of what masks hide
@pytest.mark.parametrize(("causal", "width"), [
    (True, None), (False, None), (True, 1), (True, 130), (True, 383)
])  # fmt: skip
@pytest.mark.some(3)
def test_the_kernel_of_tpus_attends(causal: bool, width: int | None) -> None:
    """As it is interpreted; two heads share keys, and there are more rows than a tile has."""
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = [(2, 4, 384, 16), (2, 2, 384, 16), (2, 2, 384, 16), (2, 4, 384, 16)]
    q, k, v, g = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))

    def kernel(q: Any, k: Any, v: Any) -> Any:
        return by_splash(q, k, v, causal, 0.3, width, interpret=True)

    def definition(q: Any, k: Any, v: Any) -> Any:
        return by_definition(q, k, v, None, causal, 0.3, width)

    (made, pull), (right, own) = (jax.vjp(f, q, k, v) for f in (kernel, definition))
    for one, other in zip((made, *pull(g)), (right, *own(g)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
