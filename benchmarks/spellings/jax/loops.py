"""Loops: over the layers, over the words with a state, and sums along time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.spellings.jax.frame import (
    LAYERS,
    C,
    H,
    S,
    V,
    dense,
    layer,
    linear,
    model,
    next_word,
    norm,
)

# layers in a loop


def block_init(key):
    qkv, out, up, down = jax.random.split(key, 4)
    return {
        "attn": {"qkv": dense(qkv, C, 3 * C), "out": dense(out, C, C)},
        "mlp": {"up": dense(up, C, 2 * C), "down": dense(down, 2 * C, C)},
        "ln": {"scale": jnp.ones((2, C)), "bias": jnp.zeros((2, C))},
    }


def block(p, x):
    b, s, c = x.shape
    first, second = (norm(x) * p["ln"]["scale"][i] + p["ln"]["bias"][i] for i in range(2))
    qkv = linear(p["attn"]["qkv"], first).reshape(b, s, 3, H, c // H)
    y = jax.nn.dot_product_attention(*(qkv[:, :, i] for i in range(3)), is_causal=True)
    x = x + linear(p["attn"]["out"], y.reshape(b, s, c))
    return x + linear(p["mlp"]["down"], jax.nn.gelu(linear(p["mlp"]["up"], second)))


def ends(key):
    embed, head = jax.random.split(key)
    return {"wte": jax.random.normal(embed, (V, C)), "head": dense(head, C, V)}


def named_layers(key):
    start, *keys = jax.random.split(key, 1 + LAYERS)
    return {**ends(start), "h": {str(i): block_init(k) for i, k in enumerate(keys)}}


def stacked_layers(key):
    start, *keys = jax.random.split(key, 1 + LAYERS)
    layers = [block_init(k) for k in keys]
    return {**ends(start), "layers": jax.tree.map(lambda *xs: jnp.stack(xs, axis=0), *layers)}


@model(
    "layers in a loop",
    "Python loop over a dict of numbered names",
    "huggingface/transformers, src/transformers/models/gpt2/modeling_flax_gpt2.py",
    init=named_layers,
)
def numbered_names(params, batch):
    x = params["wte"][batch["tokens"]]
    all_hidden_states = ()
    for name in sorted(params["h"], key=int):
        all_hidden_states += (x,)
        x = block(params["h"][name], x)
    all_hidden_states += (x,)
    return next_word(linear(params["head"], norm(all_hidden_states[-1])), batch["labels"])


@model(
    "layers in a loop",
    "scan over stacked parameters",
    "google-deepmind/dm-haiku, haiku/_src/layer_stack.py",
    init=stacked_layers,
)
def scan_stacked(params, batch):
    def body(x, p):
        return block(p, x), None

    x, _ = lax.scan(body, params["wte"][batch["tokens"]], params["layers"])
    return next_word(linear(params["head"], norm(x)), batch["labels"])


@model(
    "layers in a loop",
    "fori_loop that indexes stacked parameters",
    "jax-ml/jax, issue 1112, fori_loop in terms of scan",
    init=stacked_layers,
)
def fori_indexed(params, batch):
    def body(i, x):
        p = jax.tree_util.tree_map(
            lambda w: lax.dynamic_index_in_dim(w, i, axis=0, keepdims=False), params["layers"]
        )
        return block(p, x)

    x = params["wte"][batch["tokens"]]
    x = lax.fori_loop(0, LAYERS, body, x)
    return next_word(linear(params["head"], norm(x)), batch["labels"])


@model(
    "layers in a loop",
    "checkpoint of each layer that keeps some products",
    "JAX documentation, Gradient checkpointing with jax.checkpoint (jax.remat)",
    init=named_layers,
)
def checkpointed(params, batch):
    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )
    def remat_block(p, x):
        return block(p, x)

    x = params["wte"][batch["tokens"]]
    for i in range(LAYERS):
        x = remat_block(params["h"][f"{i}"], x)
    return next_word(linear(params["head"], norm(x)), batch["labels"])


@model(
    "layers in a loop",
    "scan over groups of a scan over layers, each group remat",
    "stanford-crfm/haliax, src/haliax/nn/scan.py, nested checkpoints",
    init=stacked_layers,
)
def nested_scans(params, batch):
    outer = 2
    grouped = jax.tree.map(
        lambda w: w.reshape(outer, w.shape[0] // outer, *w.shape[1:]), params["layers"]
    )

    def one(carry, p):
        return block(p, carry), ()

    @functools.partial(jax.remat, prevent_cse=False)
    def group(carry, ps):
        carry, _ = lax.scan(one, carry, ps, unroll=1)
        return carry, ()

    x, () = lax.scan(group, params["wte"][batch["tokens"]], grouped)
    return next_word(linear(params["head"], norm(x)), batch["labels"])


# recurrence over time


def gru_init(key):
    keys = jax.random.split(key, 6)
    names = ("xz", "xr", "xh", "hz", "hr", "hh")
    weights = {
        f"W_{n}": jax.random.normal(k, (C, C)) * 0.2 for n, k in zip(names, keys, strict=True)
    }
    return weights | {f"b_{n}": jnp.zeros(C) for n in "zrh"}


@layer(
    "recurrence over time",
    "scan of a GRU over swapped axes",
    "d2l.ai, 10.2 Gated Recurrent Units, JAX",
    gru_init,
)
def gru(p, x):
    def step(h, x):
        z = jax.nn.sigmoid(jnp.matmul(x, p["W_xz"]) + jnp.matmul(h, p["W_hz"]) + p["b_z"])
        r = jax.nn.sigmoid(jnp.matmul(x, p["W_xr"]) + jnp.matmul(h, p["W_hr"]) + p["b_r"])
        candidate = jnp.tanh(jnp.matmul(x, p["W_xh"]) + jnp.matmul(r * h, p["W_hh"]) + p["b_h"])
        h = z * h + (1 - z) * candidate
        return h, h

    _, outputs = lax.scan(step, jnp.zeros((x.shape[0], C)), jnp.swapaxes(x, 0, 1))
    return jnp.swapaxes(outputs, 0, 1)


def lstm_pair(key):
    forward, backward, out = jax.random.split(key, 3)
    return {
        "forward": dense(forward, 2 * C, 4 * C),
        "backward": dense(backward, 2 * C, 4 * C),
        "out": dense(out, 2 * C, C),
    }


@layer(
    "recurrence over time",
    "two directions of an LSTM, one scan reversed",
    "google-deepmind/dm-haiku, haiku/_src/recurrent.py, dynamic_unroll",
    lstm_pair,
)
def both_ways(p, x):
    def unroll(cell, xs, reverse):
        def core(prev_state, inputs):
            hidden, memory = prev_state
            gated = linear(cell, jnp.concatenate([inputs, hidden], axis=-1))
            i, g, f, o = jnp.split(gated, indices_or_sections=4, axis=-1)
            memory = jax.nn.sigmoid(f + 1) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
            return (hidden, memory), hidden

        zeros = jnp.zeros_like(xs[0])
        return lax.scan(core, (zeros, zeros), xs, reverse=reverse)[1]

    xs = x.transpose(1, 0, 2)
    forward = unroll(p["forward"], xs, reverse=False)
    backward = unroll(p["backward"], xs, reverse=True)
    return linear(p["out"], jnp.concatenate([forward, backward], axis=-1)).transpose(1, 0, 2)


def lru_init(key, n=C, low=0.4, high=0.99):
    nu, theta, b, c, d = jax.random.split(key, 5)
    nu = -0.5 * jnp.log(jax.random.uniform(nu, (n,)) * (high**2 - low**2) + low**2)
    return {
        "nu_log": jnp.log(nu),
        "theta_log": jnp.log(6.28 * jax.random.uniform(theta, (n,), minval=1e-2)),
        "gamma_log": jnp.log(jnp.sqrt(1 - jnp.exp(-2 * nu))),
        "B": jax.random.normal(b, (2, n, C)) / (2 * C) ** 0.5,
        "C": jax.random.normal(c, (2, C, n)) / n**0.5,
        "D": jax.random.normal(d, (C,)),
    }


@layer(
    "recurrence over time",
    "associative_scan of a complex diagonal state, under vmap",
    "NicolasZucchet/minimal-LRU, lru/model.py",
    lru_init,
)
def linear_unit(p, x):
    def combine(earlier, later):
        (a, x), (b, y) = earlier, later
        return a * b, b * x + y

    def sample(inputs):
        diagonal = jnp.exp(-jnp.exp(p["nu_log"]) + 1j * jnp.exp(p["theta_log"]))
        inward = (p["B"][0] + 1j * p["B"][1]) * jnp.expand_dims(jnp.exp(p["gamma_log"]), axis=-1)
        outward = p["C"][0] + 1j * p["C"][1]
        elements = jnp.repeat(diagonal[None, ...], inputs.shape[0], axis=0)
        elements = (elements, jax.vmap(lambda u: inward @ u)(inputs))
        _, states = lax.associative_scan(combine, elements)
        return jax.vmap(lambda h, u: (outward @ h).real + p["D"] * u)(states, inputs)

    return jax.vmap(sample)(x)


def plain_cell(key):
    inner, outer = jax.random.split(key)
    return {"x": dense(inner, C, C), "h": jax.random.normal(outer, (C, C)) * 0.5 / C**0.5}


@layer(
    "recurrence over time",
    "fori_loop that sets one row of the output",
    "jax-ml/jax, issue 1954, a rollout by fori_loop",
    plain_cell,
)
def rows_set(p, x):
    steps = x.shape[1]

    def body(t, carry):
        h, outs = carry
        h = jnp.tanh(linear(p["x"], x[:, t]) + h @ p["h"])
        return h, outs.at[:, t, :].set(h)

    h = jnp.zeros((x.shape[0], C), x.dtype)
    _, outs = lax.fori_loop(0, steps, body, (h, jnp.zeros_like(x)))
    return outs


def gate_and_value(key):
    both, out = jax.random.split(key)
    return {"both": dense(both, C, 2 * C), "out": dense(out, C, C)}


@layer(
    "recurrence over time",
    "cumsum of log gates and cumlogsumexp of log values",
    "daniel-om-weber/tsjax, tsjax/models/min_gru.py, parallel scan in logs",
    gate_and_value,
)
def log_space(p, x):
    def log_of_positive(y):
        return jnp.where(y < 0, jax.nn.log_sigmoid(y), jnp.log(jnp.maximum(y, 0) + 0.5))

    value, gate = jnp.split(linear(p["both"], norm(x)), 2, axis=-1)
    kept = jnp.cumsum(jax.nn.log_sigmoid(-gate), axis=1)
    log_values = jax.nn.log_sigmoid(gate) + log_of_positive(value)
    h = jnp.exp(kept + lax.cumlogsumexp(log_values - kept, axis=1))
    return linear(p["out"], h)


# sums along time


def mixer(key):
    value, out = jax.random.split(key)
    return {"value": dense(value, C, C), "out": dense(out, C, C)}


@layer(
    "sums along time",
    "cumsum divided by the number of words so far",
    "bzhangGo/transformer-aan, the cumulative average",
    mixer,
)
def running_mean(p, x):
    value = linear(p["value"], norm(x))
    counts = jnp.arange(1, value.shape[1] + 1, dtype=value.dtype)[None, :, None]
    average = jnp.cumsum(value, axis=1) / counts
    return linear(p["out"], jax.nn.relu(average))


@layer(
    "sums along time",
    "product with a tril of ones over its row sums",
    "Karpathy, Let's build GPT, gpt-dev.ipynb, the mathematical trick in self-attention",
    mixer,
)
def tril_product(p, x):
    t = x.shape[1]
    wei = jnp.tril(jnp.ones((t, t)))
    wei = wei / jnp.sum(wei, 1, keepdims=True)
    return linear(p["out"], jnp.tanh(wei @ linear(p["value"], norm(x))))


def kernel_init(key):
    keys = jax.random.split(key, 4)
    return {n: jax.random.normal(k, (C, C)) / C**0.5 for n, k in zip("qkvo", keys, strict=True)}


@layer(
    "sums along time",
    "cumsum of outer products of keys and values",
    "lucidrains/performer-pytorch, performer_pytorch/performer_pytorch.py, as written in jnp",
    kernel_init,
)
def outer_products(p, x):
    x = norm(x)
    q, k, v = (
        (x @ p[name]).reshape(*x.shape[:2], H, C // H).transpose(0, 2, 1, 3) for name in "qkv"
    )
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.cumsum(jnp.einsum("bhsd,bhse->bhsde", k, v), axis=2)
    total = jnp.einsum("bhsd,bhsd->bhs", q, jnp.cumsum(k, axis=2))
    out = jnp.einsum("bhsde,bhsd->bhse", state, q) / total[..., None]
    return out.transpose(0, 2, 1, 3).reshape(x.shape) @ p["o"]


def long_kernel(key):
    kernel, skip, out = jax.random.split(key, 3)
    decay = np.exp(-np.arange(S) / 4)[:, None]
    return {
        "kernel": jax.random.normal(kernel, (S, C)) * decay,
        "D": jax.random.normal(skip, (C,)),
        "out": dense(out, C, C),
    }


@layer(
    "sums along time",
    "long convolution by rfft of padded lengths",
    "srush/annotated-s4, s4/s4.py, causal_convolution",
    long_kernel,
)
def fourier(p, x):
    def causal_convolution(u, k):
        ud = jnp.fft.rfft(jnp.pad(u, (0, k.shape[0])))
        kd = jnp.fft.rfft(jnp.pad(k, (0, u.shape[0])))
        return jnp.fft.irfft(ud * kd)[: u.shape[0]]

    over_channels = jax.vmap(causal_convolution, in_axes=1, out_axes=1)
    y = jax.vmap(over_channels, in_axes=(0, None))(x, p["kernel"]) + p["D"] * x
    return linear(p["out"], jax.nn.gelu(y))


def short_kernel(key):
    kernel, both, out = jax.random.split(key, 3)
    return {
        "kernel": jax.random.normal(kernel, (4, 1, C)) * 0.5,
        "bias": jnp.zeros(C),
        "both": dense(both, C, 2 * C),
        "out": dense(out, C, C),
    }


@layer(
    "sums along time",
    "conv_general_dilated of each channel, padded on the left",
    "google/flax, flax/linen/linear.py, Conv with padding CAUSAL",
    short_kernel,
)
def depthwise(p, x):
    h, gate = jnp.split(linear(p["both"], x), [C], axis=-1)
    h = lax.conv_general_dilated(
        h,
        p["kernel"],
        window_strides=(1,),
        padding=[(3, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=C,
    )
    return linear(p["out"], jax.nn.silu(h + p["bias"]) * jax.nn.silu(gate))
