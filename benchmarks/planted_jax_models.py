"""What `benchmarks.planted_models` is for PyTorch, as functions for JAX."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar

B, S, C, H, V, LAYERS = 8, 6, 16, 4, 20, 2
Tree = dict[str, Any]


def _weights(key: Any, shapes: dict[str, tuple[int, ...]]) -> Tree:
    keys = jax.random.split(key, len(shapes))
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: jax.random.normal(k, shape) / 3 for k, (name, shape) in pairs}


def _norm(x: Any, scale: Any, shift: Any) -> Any:
    y = x - x.mean(-1, keepdims=True)
    return y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-2) * scale + shift


def _init_gpt(key: Any, length: int = S) -> Tree:
    n, m = LAYERS, 2 * C
    layer = {
        "scale": (n, C), "shift": (n, C), "qkv": (n, 3, C, C), "out": (n, C, C),
        "up": (n, C, m), "down": (n, m, C),
    }  # fmt: skip
    whole = {
        "tokens": (V, C),
        "positions": (length, C),
        "scale": (C,),
        "shift": (C,),
        "head": (V, C),
    }
    return {**_weights(key, whole), "layers": _weights(jax.random.fold_in(key, 1), layer)}


def _loss_gpt(params: Tree, batch: Tree) -> Any:
    x = params["tokens"][batch["ids"]] + params["positions"]
    s = x.shape[1]

    def layer(x: Any, p: Tree) -> tuple[Any, None]:
        h = _norm(x, p["scale"], p["shift"])
        q, k, v = (jnp.einsum("bsc,dc->bsd", h, p["qkv"][i]) for i in range(3))
        q, k, v = (t.reshape(*t.shape[:2], H, C // H).transpose(0, 2, 1, 3) for t in (q, k, v))
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k) * 0.4
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e30)
        mixed = jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(scores, axis=-1), v)
        x = x + jnp.einsum("bsc,dc->bsd", mixed.transpose(0, 2, 1, 3).reshape(x.shape), p["out"])
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = jnp.einsum("bsc,vc->bsv", _norm(x, params["scale"], params["shift"]), params["head"])
    likely = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(likely, batch["labels"][..., None], axis=-1).mean()


def _tokens(step: int = 0, length: int = S) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(step)
    tokens, labels = (draws.integers(0, V, (B, length)).astype(np.int32) for _ in range(2))
    return {"ids": tokens, "labels": labels}


def _eight_tokens(step: int = 0) -> dict[str, np.ndarray]:
    return _tokens(step, length=8)


def _init_experts(key: Any) -> Tree:
    shapes = {"tokens": (V, C), "gate": (C, 4), "up": (4, C, 2 * C), "down": (4, 2 * C, C)}
    return _weights(key, {**shapes, "head": (C, V)})


def _loss_experts(params: Tree, batch: Tree) -> Any:
    """Every token to the best of four experts, which have two places for those of a sample."""
    x = params["tokens"][batch["ids"]]
    weights = jax.nn.softmax(x @ params["gate"], axis=-1)
    chosen = jax.nn.one_hot(weights.argmax(-1), 4)
    place = jnp.cumsum(chosen, axis=1) * chosen - 1
    sent = chosen[..., None] * jax.nn.one_hot(place.max(-1).astype(jnp.int32), 2)[:, :, None]
    given = jnp.einsum("gsm,gsec->egcm", x, sent)
    made = jnp.einsum("egcm,emf->egcf", given, params["up"])
    made = jnp.einsum("egcf,efm->egcm", jax.nn.gelu(made), params["down"])
    back = jnp.einsum("egcm,gsec->gsm", made, sent * weights.max(-1)[..., None, None])
    likely = jax.nn.log_softmax((x + back) @ params["head"])
    return -jnp.take_along_axis(likely, batch["labels"][..., None], axis=-1).mean()


def _init_narrow(key: Any) -> Tree:
    n, m = C - 1, 32 * C
    shapes = {"tokens": (200 * V + 1, n), "scale": (n,), "shift": (n,), "up": (n, m), "wide": (m,)}
    return _weights(key, {**shapes, "down": (m, n), "head": (n, V + 1)})


def _loss_narrow(params: Tree, batch: Tree) -> Any:
    """Sizes that two ranks do not divide, but for one, which they split; a table whose gradient is
    too large to be summed by itself."""
    x = params["tokens"][batch["ids"]]
    h = _norm(x, params["scale"], params["shift"])
    x = x + jax.nn.relu(h @ params["up"] + params["wide"]) @ params["down"]
    likely = jax.nn.log_softmax(x @ params["head"])
    return -jnp.take_along_axis(likely, batch["labels"][..., None], axis=-1).mean()


def _few_tokens(step: int = 0) -> dict[str, np.ndarray]:
    return {name: a[:7, :5] for name, a in _tokens(step).items()}


@jax.custom_vjp  # type: ignore[untyped-decorator]
def _held_back(x: Any) -> Any:
    """``x``, whose gradient is cut off beyond a bound: not what differentiating it would give."""
    return x


_held_back.defvjp(lambda x: (x, None), lambda _, g: (0.3 * jnp.clip(g, -1e-3, 1e-3),))


def _init_ops(key: Any) -> Tree:
    shapes = {"first": (C, C), "second": (C, C), "table": (5, C), "bias": (C,), "scale": ()}
    return _weights(key, {**shapes, "kernel": (3, C, C)})


def _loss_ops(params: Tree, batch: Tree) -> Any:
    x, places = batch["x"], batch["places"]
    a, b = x @ params["first"], x @ params["second"] + params["bias"]
    up, low = jnp.split(a, 2, axis=-1)
    moved = jnp.concatenate([low, up[:, ::-1]], axis=-1)
    best = jnp.where(a > 0.3, a, jax.lax.clamp(-0.4, b, 0.7))
    spread = b.max(-1, keepdims=True) + 2.0 ** b.mean(-1, keepdims=True)
    strided = jnp.pad(a[:, 1::2], ((0, 0), (1, 2), (0, 0)), constant_values=0.5)
    picked = params["table"][places] * (1 - moved) / (2 + b**2) - b**3
    running = jnp.cumsum(jnp.tanh(moved), axis=1) + jnp.arange(C) * params["scale"]
    mixed = jax.lax.conv_general_dilated(
        a, params["kernel"], (1,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC")
    )
    total = best * spread + strided + picked + running + mixed + jax.lax.stop_gradient(a) * b
    total = total + _held_back(jnp.sin(b))
    soft = jax.nn.softmax(total, axis=1)
    return jnp.mean((soft - jnp.minimum(x, 0.5)) ** 2) + jnp.abs(total).sum() / 500


def _numbers(step: int = 0) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(step)
    x = draws.normal(size=(B, S, C)).astype(np.float32)
    return {"x": x, "places": draws.integers(0, 5, (B, S)).astype(np.int32)}


jax_gpt = autopar.Workload(
    loss=_loss_gpt, init=_init_gpt, batch=_tokens, learning_rate=1e-2, clip_norm=0.5
)
jax_long = autopar.Workload(
    loss=_loss_gpt, init=partial(_init_gpt, length=8), batch=_eight_tokens, learning_rate=1e-2
)
jax_experts = autopar.Workload(
    loss=_loss_experts, init=_init_experts, batch=_tokens, learning_rate=1e-2, clip_norm=0.05
)
jax_half = autopar.Workload(
    loss=_loss_gpt, init=_init_gpt, batch=_tokens, precision="float16", clip_norm=0.5
)
jax_narrow = autopar.Workload(
    loss=_loss_narrow, init=_init_narrow, batch=_few_tokens, learning_rate=1e-2
)
jax_ops = autopar.Workload(
    loss=_loss_ops, init=_init_ops, batch=_numbers, learning_rate=1e-2, optimizer="sgd"
)
