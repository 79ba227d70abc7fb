"""State spaces and recurrences in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.jax_zoo_models.decoders import LAYERS, C, V, cross_entropy, layer_norm, rms_norm
from benchmarks.jax_zoo_models.frame import Parts, drawn, kind, numbers, tokens

S = 4
"""Tokens: a step of a scan over them is a part of the program each."""
N = 4
"""Numbers of state a channel."""


@kind("Mamba", "plain JAX", "github.com/vvvm23/mamba-jax, mamba_jax/modelling/equinox/model.py")
def mamba():
    """A convolution of each channel, then a selective scan by associative_scan over time."""
    inner, rank, width = 2 * C, 4, 4

    def selective_scan(u, delta, a, b, c, d):
        delta_a = jnp.exp(jnp.einsum("ld,dn->ldn", delta, a))
        delta_bu = jnp.einsum("ld,ln,ld->ldn", delta, b, u)

        def combine(left, right):
            return right[0] * left[0], right[0] * left[1] + right[1]

        _, states = lax.associative_scan(combine, (delta_a, delta_bu))
        return jnp.einsum("ldn,ln->ld", states, c) + u * d

    def block(p, x):
        u, z = jnp.split(x @ p["in"], 2, axis=-1)
        u = lax.conv_general_dilated(
            u.T[None],
            p["conv"],
            (1,),
            [(width - 1, 0)],
            dimension_numbers=("NCH", "OIH", "NCH"),
            feature_group_count=inner,
        )[0].T
        u = jax.nn.silu(u + p["conv_bias"])
        delta, b, c = jnp.split(u @ p["x"], [rank, rank + N], axis=-1)
        delta = jax.nn.softplus(delta @ p["dt"] + p["dt_bias"])
        y = selective_scan(u, delta, -jnp.exp(p["A_log"]), b, c, p["D"])
        return (y * jax.nn.silu(z)) @ p["out"]

    def loss(params, batch):
        def logits_of(ids):
            x = params["embed"][ids]
            for p in params["layers"]:
                x = x + block(p, rms_norm(x, p["norm"]))
            return rms_norm(x, params["norm"]) @ params["embed"].T

        return cross_entropy(jax.vmap(logits_of)(batch["tokens"]), batch["labels"])

    layer = {
        "norm": (C,),
        "in": (C, 2 * inner),
        "conv": (inner, 1, width),
        "conv_bias": (inner,),
        "x": (inner, rank + 2 * N),
        "dt": (rank, inner),
        "dt_bias": (inner,),
        "A_log": (inner, N),
        "D": (inner,),
        "out": (inner, C),
    }
    shapes = {"embed": (V, C), "layers": [layer] * LAYERS, "norm": (C,)}
    return Parts(lambda key: drawn(key, shapes), loss, tokens(S, V, "tokens", "labels"))


@kind("LRU", "plain JAX", "github.com/NicolasZucchet/minimal-LRU, lru/model.py")
def lru():
    """A diagonal recurrence in complex numbers, by associative_scan."""
    states = 16

    def binary_operator_diag(i, j):
        a_i, bu_i = i
        a_j, bu_j = j
        return a_j * a_i, a_j * bu_i + bu_j

    def layer(p, inputs):
        lam = jnp.exp(-jnp.exp(p["nu_log"]) + 1j * jnp.exp(p["theta_log"]))
        b_norm = (p["B_re"] + 1j * p["B_im"]) * jnp.expand_dims(jnp.exp(p["gamma_log"]), axis=-1)
        c = p["C_re"] + 1j * p["C_im"]
        elements = jnp.repeat(lam[None, ...], inputs.shape[0], axis=0)
        bu = jax.vmap(lambda u: b_norm @ u)(inputs)
        _, hidden = lax.associative_scan(binary_operator_diag, (elements, bu))
        return jax.vmap(lambda h, u: (c @ h).real + p["D"] * u)(hidden, inputs)

    def loss(params, batch):
        def model(x):
            x = x @ params["encoder"]
            for p in params["layers"]:
                y = jax.nn.gelu(layer(p, layer_norm(x, **p["norm"])))
                x = x + (y @ p["out1"]) * jax.nn.sigmoid(y @ p["out2"])
            return x.mean(0) @ params["decoder"]

        return jnp.mean(jnp.square(jax.vmap(model)(batch["x"]) - batch["y"]))

    each = {
        **{n: (states,) for n in ("nu_log", "theta_log", "gamma_log")},
        **{n: (states, C) for n in ("B_re", "B_im")},
        **{n: (C, states) for n in ("C_re", "C_im")},
        "D": (C,),
        "norm": {"g": (C,), "b": (C,)},
        "out1": (C, C),
        "out2": (C, C),
    }
    shapes = {"encoder": (8, C), "layers": [each] * LAYERS, "decoder": (C, 8)}

    def batch(draws):
        return {"x": numbers(draws, S, 8), "y": numbers(draws, 8)}

    return Parts(lambda key: drawn(key, shapes), loss, batch)


@kind("S4D", "plain JAX", "github.com/srush/annotated-s4, s4/s4d.py")
def s4d():
    """The kernel of a diagonal state space, a Vandermonde product in complex numbers, applied by
    fast Fourier transforms."""

    def kernel(c, a, length):
        return (c * (jnp.exp(a) - 1) / a) @ jnp.exp(jnp.arange(length) * a[:, None])

    def causal_convolution(u, k):
        ud = jnp.fft.rfft(jnp.pad(u, (0, k.shape[0])))
        kd = jnp.fft.rfft(jnp.pad(k, (0, u.shape[0])))
        return jnp.fft.irfft(ud * kd)[: u.shape[0]]

    def channel(p, u):
        lam = jnp.clip(p["Lambda_re"], None, -1e-4) + 1j * p["Lambda_im"]
        c = p["C"][..., 0] + 1j * p["C"][..., 1]
        step = jnp.exp(p["log_step"])
        return causal_convolution(u, kernel(c, step * lam, u.shape[0]).real) + p["D"] * u

    def loss(params, batch):
        def model(x):
            x = x @ params["encoder"]
            for p in params["layers"]:
                y = jax.vmap(channel, in_axes=(0, 1), out_axes=1)(p["s4"], layer_norm(x, **p["n"]))
                y = jax.nn.gelu(y)
                x = x + (y @ p["out"]) * jax.nn.sigmoid(y @ p["out2"])
            return x.mean(0) @ params["decoder"]

        return jnp.mean(jnp.square(jax.vmap(model)(batch["x"]) - batch["y"]))

    s4 = {
        "Lambda_re": (C, N),
        "Lambda_im": (C, N),
        "C": (C, N, 2),
        "D": (C,),
        "log_step": (C,),
    }
    each = {"s4": s4, "n": {"g": (C,), "b": (C,)}, "out": (C, C), "out2": (C, C)}
    shapes = {"encoder": (8, C), "layers": [each] * LAYERS, "decoder": (C, 8)}

    def init(key):
        params = drawn(key, shapes)
        for p in params["layers"]:
            p["s4"]["Lambda_re"] = -0.5 - jnp.abs(p["s4"]["Lambda_re"])
            p["s4"]["Lambda_im"] = p["s4"]["Lambda_im"] + jnp.pi * jnp.arange(N)
        return params

    def batch(draws):
        return {"x": numbers(draws, S, 8), "y": numbers(draws, 8)}

    return Parts(init, loss, batch)


@kind("RWKV", "plain JAX", "github.com/BlinkDL/RWKV-LM, RWKV-v4 (in JAX: mrsteyk/RWKV-LM-jax)")
def rwkv():
    """Time mixing by a scan over tokens whose carry is a numerator, a denominator and an exponent
    that keeps them small; channel mixing; every token shifted by one."""

    def shifted(x):
        return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]

    def mix(x, last, ratio):
        return x * ratio + last * (1 - ratio)

    def time_mixing(p, x):
        last = shifted(x)
        k = mix(x, last, p["mix_k"]) @ p["key"]
        v = mix(x, last, p["mix_v"]) @ p["value"]
        r = jax.nn.sigmoid(mix(x, last, p["mix_r"]) @ p["receptance"])
        decay, bonus = -jnp.exp(p["decay"]), p["bonus"]

        def step(state, kv):
            aa, bb, pp = state
            kk, vv = kv
            ww = bonus + kk
            top = jnp.maximum(pp, ww)
            e1, e2 = jnp.exp(pp - top), jnp.exp(ww - top)
            wkv = (e1 * aa + e2 * vv) / (e1 * bb + e2)
            ww = pp + decay
            top = jnp.maximum(ww, kk)
            e1, e2 = jnp.exp(ww - top), jnp.exp(kk - top)
            return (e1 * aa + e2 * vv, e1 * bb + e2, top), wkv

        zero = jnp.zeros_like(k[:, 0])
        start = (zero, zero, zero - 1e38)
        _, wkv = lax.scan(step, start, (k.swapaxes(0, 1), v.swapaxes(0, 1)))
        return (r * wkv.swapaxes(0, 1)) @ p["output"]

    def channel_mixing(p, x):
        last = shifted(x)
        k = jnp.square(jax.nn.relu(mix(x, last, p["mix_k"]) @ p["key"]))
        return jax.nn.sigmoid(mix(x, last, p["mix_r"]) @ p["receptance"]) * (k @ p["value"])

    def loss(params, batch):
        x = layer_norm(params["emb"][batch["tokens"]], **params["ln0"])
        for p in params["blocks"]:
            x = x + time_mixing(p["att"], layer_norm(x, **p["ln1"]))
            x = x + channel_mixing(p["ffn"], layer_norm(x, **p["ln2"]))
        return cross_entropy(layer_norm(x, **params["ln_out"]) @ params["head"], batch["labels"])

    norm = {"g": (C,), "b": (C,)}
    mixes = {n: (C,) for n in ("mix_k", "mix_v", "mix_r")}
    block = {
        "ln1": norm,
        "ln2": norm,
        "att": {
            **mixes,
            "decay": (C,),
            "bonus": (C,),
            **{n: (C, C) for n in ("key", "value", "receptance", "output")},
        },
        "ffn": {
            "mix_k": (C,),
            "mix_r": (C,),
            "key": (C, 64),
            "value": (64, C),
            "receptance": (C, C),
        },
    }
    shapes = {"emb": (V, C), "ln0": norm, "blocks": [block] * LAYERS, "ln_out": norm}
    return Parts(
        lambda key: drawn(key, {**shapes, "head": (C, V)}), loss, tokens(S, V, "tokens", "labels")
    )


@kind("Gated DeltaNet", "plain JAX", "github.com/huggingface/transformers, qwen3_next (recurrent)")
def delta_net():
    """A state [keys, values] a head that forgets by a gate and is corrected by a delta rule, one
    token after the other."""
    heads, d = 8, 4

    def unit(x):
        return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)

    def mixer(p, x):
        q, k, v = (jnp.einsum("bsc,chd->bshd", x, p[n]) for n in "qkv")
        q, k = unit(q) * d**-0.5, unit(k)
        beta = jax.nn.sigmoid(x @ p["b"])
        gate = -jnp.exp(p["A_log"]) * jax.nn.softplus(x @ p["a"] + p["dt_bias"])

        def step(state, token):
            q_t, k_t, v_t, g_t, beta_t = token
            state = state * jnp.exp(g_t)[..., None, None]
            memory = (state * k_t[..., None]).sum(-2)
            delta = (v_t - memory) * beta_t[..., None]
            state = state + k_t[..., None] * delta[..., None, :]
            return state, (state * q_t[..., None]).sum(-2)

        start = jnp.zeros((x.shape[0], heads, d, d), x.dtype)
        moved = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (q, k, v, gate, beta))
        _, out = lax.scan(step, start, moved)
        out = rms_norm(jnp.moveaxis(out, 0, 1), p["norm"]).reshape(x.shape)
        return (out * jax.nn.silu(x @ p["z"])) @ p["out"]

    def loss(params, batch):
        def layer(x, p):
            x = x + mixer(p, rms_norm(x, p["pre"]))
            h = rms_norm(x, p["post"])
            return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

        x, _ = lax.scan(layer, params["embed"][batch["tokens"]], params["layers"])
        return cross_entropy(rms_norm(x, params["norm"]) @ params["embed"].T, batch["labels"])

    n = LAYERS
    layers = {
        **{name: (n, C, heads, d) for name in "qkv"},
        **{name: (n, C, heads) for name in "ab"},
        **{name: (n, heads) for name in ("A_log", "dt_bias")},
        **{name: (n, C) for name in ("pre", "post")},
        "norm": (n, d),
        "z": (n, C, C),
        "out": (n, C, C),
        "gate": (n, C, 64),
        "up": (n, C, 64),
        "down": (n, 64, C),
    }
    shapes = {"embed": (V, C), "layers": layers, "norm": (C,)}
    return Parts(lambda key: drawn(key, shapes), loss, tokens(S, V, "tokens", "labels"))
