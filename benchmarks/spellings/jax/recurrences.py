"""Layers that go along time step by step, over more steps than are written out."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.spellings.jax.frame import LAYERS, B, C, dense, linear, model, norm

STEPS, N = 48, 4


def long(step=0):
    """``x`` and ``y`` [b, 48, c]."""
    draws = np.random.default_rng(step)
    x, y = (draws.normal(size=(B, STEPS, C)).astype(np.float32) for _ in range(2))
    return {"x": x, "y": y}


def recurrent(way, source, init):
    """Lists ``apply(params, x)`` of [b, s, c], in every layer of a regression."""

    def listed(apply):
        def start(key):
            *keys, last = jax.random.split(key, LAYERS + 1)
            return {"layers": [init(k) for k in keys], "out": dense(last, C, C)}

        @model("recurrences over time", way, source, start, batch=long)
        def loss(params, batch):
            x = batch["x"]
            for p in params["layers"]:
                x = x + apply(p, norm(x))
            return jnp.mean((linear(params["out"], x) - batch["y"]) ** 2)

        return apply

    return listed


def gates(count):
    def init(key):
        a, b = jax.random.split(key)
        return {"i": dense(a, C, count * C), "h": dense(b, C, count * C)}

    return init


@recurrent("a GRU cell over swapped axes", "google/flax, flax/linen/recurrent.py", gates(3))
def gru(p, x):
    def cell(h, row):
        ri, zi, ni = jnp.split(linear(p["i"], row), 3, -1)
        rh, zh, nh = jnp.split(linear(p["h"], h), 3, -1)
        z = jax.nn.sigmoid(zi + zh)
        h = (1.0 - z) * jnp.tanh(ni + jax.nn.sigmoid(ri + rh) * nh) + z * h
        return h, h

    _, ys = lax.scan(cell, jnp.zeros((x.shape[0], C)), jnp.swapaxes(x, 0, 1))
    return jnp.swapaxes(ys, 0, 1)


@recurrent(
    "an LSTM of one sample under vmap", "patrick-kidger/equinox, examples/train_rnn.ipynb", gates(4)
)
def lstm(p, x):
    def cell(carry, row):
        h, c = carry
        i, f, g, o = jnp.split(linear(p["i"], row) + linear(p["h"], h), 4, -1)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def one(rows):
        return lax.scan(cell, (jnp.zeros(C), jnp.zeros(C)), rows)[1]

    return jax.vmap(one)(x)


def selective_init(key):
    a, b, c = jax.random.split(key, 3)
    return {
        "delta": dense(a, C, C),
        "bc": dense(b, C, 2 * N),
        "log_a": jnp.log(jnp.tile(jnp.arange(1.0, N + 1), (C, 1))),
        "out": dense(c, C, C),
    }


@recurrent(
    "a selective state space step by step", "radarFudan/mamba-minimal-jax, model.py", selective_init
)
def selective(p, x):
    delta = jax.nn.softplus(linear(p["delta"], x))
    b, c = jnp.split(linear(p["bc"], x), 2, -1)
    decay = jnp.exp(jnp.einsum("bld,dn->bldn", delta, -jnp.exp(p["log_a"])))
    drive = jnp.einsum("bld,bln,bld->bldn", delta, b, x)

    def step(h, row):
        a_t, u_t, c_t = row
        h = a_t * h + u_t
        return h, jnp.einsum("bdn,bn->bd", h, c_t)

    rows = tuple(jnp.moveaxis(v, 1, 0) for v in (decay, drive, c))
    _, y = lax.scan(step, jnp.zeros((x.shape[0], C, N)), rows)
    return linear(p["out"], jnp.moveaxis(y, 0, 1))


def wkv_init(key):
    keys = jax.random.split(key, 4)
    return {
        **{n: dense(k, C, C) for n, k in zip("rkvo", keys, strict=True)},
        "decay": jnp.linspace(-2.0, 1.0, C),
        "bonus": jnp.zeros(C),
    }


@recurrent(
    "attention without attention with a running maximum", "BlinkDL/RWKV-LM, RWKV-v4neo, as jnp",
    wkv_init,
)  # fmt: skip
def wkv(p, x):
    r, k, v = (linear(p[n], x) for n in "rkv")
    w, u = -jnp.exp(p["decay"]), p["bonus"]

    def step(carry, row):
        top, bottom, most = carry
        k_t, v_t = row
        q = jnp.maximum(most, u + k_t)
        e1, e2 = jnp.exp(most - q), jnp.exp(u + k_t - q)
        out = (e1 * top + e2 * v_t) / (e1 * bottom + e2)
        q = jnp.maximum(most + w, k_t)
        e1, e2 = jnp.exp(most + w - q), jnp.exp(k_t - q)
        return (e1 * top + e2 * v_t, e1 * bottom + e2, q), out

    zero = jnp.zeros((*x.shape[:1], C))
    rows = (k.transpose(1, 0, 2), v.transpose(1, 0, 2))
    _, out = lax.scan(step, (zero, zero, zero - 1e38), rows)
    return linear(p["o"], jax.nn.sigmoid(r) * out.transpose(1, 0, 2))


@recurrent(
    "an outer-product memory, remade in backward",
    "Yang et al. 2024, DeltaNet, equation 2",
    wkv_init,
)
def delta_rule(p, x):
    q, k, v = (linear(p[n], x) for n in "rkv")
    k = k / (jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-6)
    beta = jax.nn.sigmoid(x @ p["o"]["w"].mean(-1, keepdims=True))

    @jax.checkpoint
    def step(memory, row):
        q_t, k_t, v_t, b_t = row
        old = jnp.einsum("bcd,bd->bc", memory, k_t)
        memory = memory + jnp.einsum("bc,bd->bcd", b_t * (v_t - old), k_t)
        return memory, jnp.einsum("bcd,bd->bc", memory, q_t)

    rows = jax.tree.map(lambda t: jnp.moveaxis(t, 1, 0), (q, k, v, beta))
    _, out = lax.scan(step, jnp.zeros((x.shape[0], C, C)), rows)
    return linear(p["o"], jnp.moveaxis(out, 0, 1))
