"""Attention: its masks, its heads, its shared keys, and how it knows where a word stands."""

import math

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
    padded,
)

D = C // H
"""Channels of a head."""
GROUPS = 2
MASKED = -0.7 * float(np.finfo(np.float32).max)


def normal(key, *shape):
    return jax.random.normal(key, shape) / C**0.5


def square(key):
    return {n: normal(k, C, C) for n, k in zip("qkvo", jax.random.split(key, 4), strict=True)}


def projected(p, x):
    """Queries, keys and values [b, s, h, d]."""
    b, s, _ = x.shape
    return tuple((x @ p[name]).reshape(b, s, H, D) for name in "qkv")


def future_hidden(scores):
    """Scores [..., q, k] with what comes later set to the least number."""
    q, k = scores.shape[-2:]
    return jnp.where(jnp.arange(q)[:, None] >= jnp.arange(k), scores, MASKED)


# causal mask


@layer("causal mask", "where a tril of ones is zero", "cgarciae/nanoGPT-jax, model.py", square)
def tril_of_ones(p, x):
    b, s, c = x.shape
    q, k, v = (y.swapaxes(1, 2) for y in projected(p, x))
    allowed = jnp.tril(jnp.ones((s, s))).reshape((1, 1, s, s))
    weights = (q @ k.swapaxes(-2, -1)) * (1.0 / jnp.sqrt(D))
    weights = jnp.where(allowed == 0, float("-inf"), weights)
    mixed = jax.nn.softmax(weights, axis=-1) @ v
    return mixed.swapaxes(1, 2).reshape(b, s, c) @ p["o"]


@layer(
    "causal mask",
    "comparison of two broadcasted iotas",
    "AI-Hypercomputer/maxtext, MaxText/layers/attentions.py",
    square,
)
def two_iotas(p, x):
    q, k, v = projected(p, x)
    scores = jnp.einsum("bthd,bshd->bhts", q / math.sqrt(D), k)
    shape = (x.shape[1], x.shape[1])
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    scores = jnp.where((column <= row)[None, None, :, :], scores, MASKED)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)
    return mixed.reshape(x.shape) @ p["o"]


@layer(
    "causal mask",
    "bias of minus 1e10 made by numpy",
    "kingoflolz/mesh-transformer-jax, mesh_transformer/layers.py",
    square,
)
def numpy_bias(p, x):
    b, s, _ = x.shape
    bias = -1e10 * (1.0 - np.tril(np.ones((s, s))))
    q, k, v = projected(p, x)
    logits = jnp.einsum("bthd,bThd->bhtT", q, k)
    logits = logits / np.sqrt(D).astype(k.dtype)
    logits += bias
    mixed = jnp.einsum("bhtT,bThd->bthd", jax.nn.softmax(logits), v)
    return mixed.reshape((b, s, -1)) @ p["o"]


@layer(
    "causal mask",
    "is_causal of dot_product_attention",
    "JAX documentation, jax.nn.dot_product_attention",
    square,
)
def is_causal(p, x):
    q, k, v = projected(p, x)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["o"]


def one_head(q, k, v, mask):
    """Of one sample and one head: [s, d]."""
    scores = q @ k.T / q.shape[-1] ** 0.5
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jax.nn.softmax(scores, axis=-1) @ v


@layer(
    "causal mask",
    "boolean mask given to vmap over heads",
    "patrick-kidger/equinox, equinox/nn/_attention.py",
    square,
)
def vmap_over_heads(p, x):
    def sample(x):
        s, c = x.shape
        q, k, v = (jax.vmap(lambda row, w=p[n]: row @ w)(x).reshape(s, H, D) for n in "qkv")
        mask = jnp.tril(jnp.ones((s, s), dtype=bool))
        mixed = jax.vmap(one_head, in_axes=(1, 1, 1, None), out_axes=1)(q, k, v, mask)
        return mixed.reshape(s, c) @ p["o"]

    return jax.vmap(sample)(x)


# padding mask


def encoder(way, source):
    """Lists ``attend(p, x, mask)`` as the attention in four layers over padded words."""

    def listed(attend):
        def init(key):
            keys = jax.random.split(key, 2 + 3 * LAYERS)
            layers = [
                {"attention": square(a), "up": dense(u, C, 2 * C), "down": dense(d, 2 * C, C)}
                for a, u, d in keys[2:].reshape(LAYERS, 3)
            ]
            return {
                "embed": jax.random.normal(keys[0], (V, C)),
                "layers": layers,
                "head": dense(keys[1], C, V),
            }

        def loss(params, batch):
            mask = batch["mask"]
            x = params["embed"][batch["tokens"]]
            for p in params["layers"]:
                x = norm(x + attend(p["attention"], x, mask))
                x = norm(x + linear(p["down"], jax.nn.gelu(linear(p["up"], x))))
            logp = jax.nn.log_softmax(linear(params["head"], x))
            picked = jnp.take_along_axis(logp, batch["labels"][..., None], axis=-1)[..., 0]
            return -jnp.sum(picked * mask) / jnp.sum(mask)

        model("padding mask", way, source, init=init, batch=padded)(loss)
        return attend

    return listed


@encoder(
    "select between zeros and the least number",
    "huggingface/transformers, src/transformers/models/bert/modeling_flax_bert.py",
)
def select_of_fulls(p, x, mask):
    mask = jnp.expand_dims(mask, axis=(-3, -2))
    bias = lax.select(
        mask > 0,
        jnp.full(mask.shape, 0.0).astype(x.dtype),
        jnp.full(mask.shape, jnp.finfo(x.dtype).min).astype(x.dtype),
    )
    q, k, v = projected(p, x)
    scores = jnp.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(D).astype(x.dtype), k) + bias
    weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("...hqk,...khd->...qhd", weights, v)
    return mixed.reshape((*mixed.shape[:2], C)) @ p["o"]


@encoder("where argument of softmax", "JAX documentation, jax.nn.softmax")
def softmax_where(p, x, mask):
    q, k, v = (y.transpose(0, 2, 1, 3) for y in projected(p, x))
    scores = jnp.matmul(q, k.transpose(0, 1, 3, 2)) / D**0.5
    weights = jax.nn.softmax(scores, axis=-1, where=mask[:, None, None, :].astype(bool))
    return jnp.matmul(weights, v).transpose(0, 2, 1, 3).reshape(x.shape) @ p["o"]


@encoder(
    "lengths given to dot_product_attention", "JAX documentation, jax.nn.dot_product_attention"
)
def lengths_of_keys(p, x, mask):
    lengths = mask.sum(axis=-1)
    q, k, v = projected(p, x)
    mixed = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)
    return jnp.dot(mixed.reshape(*x.shape[:-1], -1), p["o"])


@encoder(
    "segment ids compared with each other",
    "AI-Hypercomputer/maxtext, MaxText/layers/attentions.py, decoder_segment_ids",
)
def segment_ids(p, x, segments):
    same = segments[:, :, None] == segments[:, None, :]
    same = same[:, None, :, :]
    q, k, v = projected(p, x)
    scores = jnp.where(same, jnp.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5, MASKED)
    scores = scores - scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["o"]


@encoder(
    "product of a sample's mask with itself, under vmap",
    "patrick-kidger/equinox, examples/bert.ipynb",
)
def sample_mask(p, x, mask):
    def sample(x, mask):
        pairs = jnp.multiply(jnp.expand_dims(mask, axis=-1), jnp.expand_dims(mask, axis=-2))
        pairs = jnp.repeat(jnp.expand_dims(pairs, axis=-3), repeats=H, axis=-3)
        q, k, v = (jnp.reshape(x @ p[name], (S, H, D)) for name in "qkv")
        mixed = jax.vmap(one_head, in_axes=(1, 1, 1, 0), out_axes=1)(q, k, v, pairs)
        return mixed.reshape(S, C) @ p["o"]

    return jax.vmap(sample)(x, mask)


# split and merge heads


def packed(key):
    qkv, out = jax.random.split(key)
    return {"qkv": normal(qkv, C, 3 * C), "out": normal(out, C, C)}


@layer(
    "split and merge heads",
    "split of packed products, reshape and swapaxes",
    "cgarciae/nanoGPT-jax, model.py",
    packed,
)
def split_and_swap(p, x):
    b, t, c = x.shape
    thirds = jnp.split(x @ p["qkv"], 3, axis=-1)
    q, k, v = (third.reshape(b, t, H, c // H).swapaxes(1, 2) for third in thirds)
    weights = jax.nn.softmax(future_hidden(q @ k.swapaxes(-2, -1) / math.sqrt(D)), axis=-1)
    return (weights @ v).swapaxes(1, 2).reshape(b, t, c) @ p["out"]


def by_head(key):
    qkv, out = jax.random.split(key)
    return {"qkv": normal(qkv, 3, H, C, D), "out": normal(out, H, D, C)}


@layer(
    "split and merge heads",
    "einsum with weights of three, heads and two widths",
    "google-deepmind/gemma, gemma/gm/nn/_modules.py",
    by_head,
)
def einsum_weights(p, x):
    q, k, v = jnp.einsum("btc,xhcd->xbthd", x, p["qkv"])
    scores = jnp.einsum("bthd,bshd->bhts", q * D**-0.5, k)
    weights = jax.nn.softmax(future_hidden(scores), axis=-1)
    return jnp.einsum("bthd,hdc->btc", jnp.einsum("bhts,bshd->bthd", weights, v), p["out"])


def stacked_heads(key):
    def one(key):
        q, k, v, o = jax.random.split(key, 4)
        return {
            "q": normal(q, C, D),
            "k": normal(k, C, D),
            "v": normal(v, C, D),
            "o": dense(o, D, C),
        }

    return jax.vmap(one)(jax.random.split(key, H))


@layer(
    "split and merge heads",
    "vmap of a whole head over stacked weights",
    "google/flax, examples/linen_design_test/attention_simple.py",
    stacked_heads,
)
def vmap_of_a_head(p, x):
    def head(p, x):
        q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
        weights = jax.nn.softmax(future_hidden(q @ jnp.matrix_transpose(k) / D**0.5), axis=-1)
        return linear(p["o"], weights @ v)

    return jax.vmap(head, in_axes=(0, None), out_axes=-2)(p, x).mean(axis=-2)


@layer(
    "split and merge heads",
    "reshape to three and heads, moveaxis",
    "paganpasta/eqxvision, eqxvision/models/classification/vit.py (by transpose)",
    packed,
)
def move_three_first(p, x):
    b, n, c = x.shape
    qkv = (x @ p["qkv"]).reshape(b, n, 3, H, c // H)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.moveaxis(q, 2, 1) @ jnp.moveaxis(k, 1, -1) * D**-0.5
    mixed = jax.nn.softmax(scores, axis=-1) @ jnp.moveaxis(v, 2, 1)
    return jnp.moveaxis(mixed, 1, 2).reshape(b, n, c) @ p["out"]


def listed_heads(key):
    heads = []
    for _ in range(H):
        key, *some = jax.random.split(key, 4)
        widths = (D, D, C)
        heads.append([dense(k, C, width) for k, width in zip(some, widths, strict=True)])
    return heads


@layer(
    "split and merge heads",
    "loop over a list of heads, each added",
    "awf/functional-transformer, transformer.py",
    listed_heads,
)
def loop_over_heads(heads, x):
    mask = jnp.log(jnp.tril(jnp.ones((x.shape[1], x.shape[1]))))
    out = jnp.zeros_like(x)
    for query, key, value in heads:
        score = linear(query, x) @ linear(key, x).transpose(0, 2, 1) + mask
        out += jax.nn.softmax(score / jnp.sqrt(D), axis=-1) @ linear(value, x)
    return out


# grouped keys and values


def grouped(key):
    q, k, v, o = jax.random.split(key, 4)
    narrow = GROUPS * D
    return {
        "wq": normal(q, C, C),
        "wk": normal(k, C, narrow),
        "wv": normal(v, C, narrow),
        "wo": normal(o, C, C),
    }


def grouped_projected(p, x):
    b, s, _ = x.shape
    q = (x @ p["wq"]).reshape(b, s, H, D)
    k = (x @ p["wk"]).reshape(b, s, GROUPS, D)
    v = (x @ p["wv"]).reshape(b, s, GROUPS, D)
    return q, k, v


@layer(
    "grouped keys and values",
    "repeat along the head axis",
    "xjdr-alt/entropix, entropix/kvcache.py and model.py",
    grouped,
)
def repeated_keys(p, x):
    q, k, v = grouped_projected(p, x)
    k = jnp.repeat(k, H // GROUPS, axis=2)
    v = jnp.repeat(v, H // GROUPS, axis=2)
    q = jnp.transpose(q, (0, 2, 1, 3))
    k = jnp.transpose(k, (0, 2, 3, 1))
    v = jnp.transpose(v, (0, 2, 1, 3))
    scores = future_hidden(jnp.matmul(q, k) / jnp.sqrt(D))
    mixed = jnp.matmul(jax.nn.softmax(scores, axis=-1), v)
    return jnp.dot(jnp.swapaxes(mixed, 1, 2).reshape(x.shape), p["wo"])


@layer(
    "grouped keys and values",
    "queries reshaped to groups, einsum of five letters",
    "AI-Hypercomputer/maxtext, MaxText/layers/attentions.py, qk_product and wv_product",
    grouped,
)
def reshaped_queries(p, x):
    q, k, v = grouped_projected(p, x)
    b, t, n, d = q.shape
    q = jnp.reshape(q, (b, t, GROUPS, n // GROUPS, d))
    scores = future_hidden(jnp.einsum("btkgd,bskd->bkgts", q, k) / d**0.5)
    out = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores, axis=-1), v)
    return jnp.reshape(out, (b, t, n * d)) @ p["wo"]


@layer(
    "grouped keys and values",
    "fewer key heads given to dot_product_attention",
    "JAX documentation, jax.nn.dot_product_attention",
    grouped,
)
def fewer_key_heads(p, x):
    q, k, v = grouped_projected(p, x)
    out = jax.nn.dot_product_attention(q, k, v, scale=D**-0.5, is_causal=True)
    return out.reshape(x.shape) @ p["wo"]


def one_key_head(key):
    fused, out = jax.random.split(key)
    return {"wi": normal(fused, C, C + 2 * D), "wo": normal(out, C, C)}


@layer(
    "grouped keys and values",
    "one key head that einsum shares",
    "lucidrains/PaLM-jax, palm_jax/palm_lite.py",
    one_key_head,
)
def shared_by_einsum(p, x):
    q, k, v = jnp.split(x @ p["wi"], np.cumsum([C, D]), axis=-1)
    q = q.reshape(*q.shape[:-1], H, D).swapaxes(-2, -3) * D**-0.5
    weights = jax.nn.softmax(future_hidden(jnp.einsum("...htd,...sd->...hts", q, k)), axis=-1)
    mixed = jnp.einsum("...hts,...sd->...htd", weights, v)
    return mixed.swapaxes(-2, -3).reshape(x.shape) @ p["wo"]


def weights_of_groups(key):
    q, k, v, o = jax.random.split(key, 4)
    return (
        normal(q, C, H // GROUPS, GROUPS, D),
        normal(k, C, GROUPS, D),
        normal(v, C, GROUPS, D),
        normal(o, H // GROUPS, GROUPS, D, C),
    )


@layer(
    "grouped keys and values",
    "query weights with an axis of repeats",
    "ayaka14732/llama-2-jax, lib/llama/attention.py",
    weights_of_groups,
)
def axis_of_repeats(p, x):
    wq, wk, wv, wo = p
    q = jnp.einsum("btc,crgd->brgtd", x, wq)
    k, v = (jnp.einsum("bsc,cgd->bgsd", x, w) for w in (wk, wv))
    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), dtype=jnp.bool_))[None, None, None]
    scores = jnp.where(seen, jnp.einsum("brgtd,bgsd->brgts", q, k) / math.sqrt(D), -jnp.inf)
    weights = jnp.where(seen, jax.nn.softmax(scores), 0)
    return jnp.einsum("brgts,bgsd,rgdc->btc", weights, v, wo)


# positions


def rotated_pairs(x, turns):
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    turned = lax.complex(pairs[..., 0], pairs[..., 1]) * turns[None, :, None, :]
    return jnp.stack((jnp.real(turned), jnp.imag(turned)), axis=-1).reshape(x.shape)


@layer(
    "positions",
    "rotary by complex numbers",
    "young-geng/EasyLM, EasyLM/models/llama/llama_model.py",
    square,
)
def rotary_complex(p, x):
    rates = 1.0 / (10000.0 ** (np.arange(0, D, 2)[: D // 2].astype(np.float32) / D))
    angles = np.outer(np.arange(x.shape[1]), rates).astype(np.float32)
    turns = jnp.asarray(np.complex64(np.cos(angles) + 1j * np.sin(angles)))
    q, k, v = projected(p, x)
    q, k = rotated_pairs(q, turns).astype(x.dtype), rotated_pairs(k, turns).astype(x.dtype)
    scores = future_hidden(jnp.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
    return out.reshape(x.shape) @ p["o"]


def rotate_half(x):
    half = x.shape[-1] // 2
    return jnp.concatenate((-x[..., half:], x[..., :half]), axis=-1)


@layer(
    "positions",
    "rotary by halves that change places",
    "huggingface/transformers, src/transformers/models/llama/modeling_flax_llama.py",
    square,
)
def rotary_halves(p, x):
    rates = 1.0 / (10000 ** (jnp.arange(0, D, 2) / D))
    freqs = jnp.einsum("i , j -> i j", jnp.arange(x.shape[1]), rates).astype("float32")
    emb = jnp.concatenate((freqs, freqs), axis=-1)[None, :, None, :]
    sin, cos = jnp.sin(emb), jnp.cos(emb)
    q, k, v = projected(p, x)
    q = q * cos + rotate_half(q) * sin
    k = k * cos + rotate_half(k) * sin
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["o"]


def decoder_init(key):
    embed, place, head, *rest = jax.random.split(key, 3 + 2 * LAYERS)
    blocks = {
        f"h_{i}": {"attn": square(rest[2 * i]), "mlp": dense(rest[2 * i + 1], C, C)}
        for i in range(LAYERS)
    }
    return {
        "wte": jax.random.normal(embed, (V, C)) * 0.5,
        "wpe": jax.random.normal(place, (S, C)) * 0.02,
        "blocks": blocks,
        "head": dense(head, C, V),
    }


def decoder(params, x, labels):
    for i in range(LAYERS):
        p = params["blocks"][f"h_{i}"]
        x = x + is_causal(p["attn"], norm(x))
        x = x + jax.nn.gelu(linear(p["mlp"], norm(x)))
    return next_word(linear(params["head"], norm(x)), labels)


def no_places(key):
    params = decoder_init(key)
    del params["wpe"]
    return params


def sinusoids(length, width):
    table = np.zeros((length, width), dtype=np.float32)
    position = np.arange(0, length)[:, np.newaxis]
    rate = np.exp(np.arange(0, width // 2) * -(np.log(10000.0) / (width // 2 - 1)))
    table[:, : width // 2] = np.sin(position * rate)
    table[:, width // 2 :] = np.cos(position * rate)
    return jnp.array(table[np.newaxis, :, :])


@model(
    "positions",
    "sinusoids filled into a numpy table",
    "google/flax, examples/lm1b/models.py, sinusoidal_init",
    init=no_places,
)
def sinusoidal(params, batch):
    tokens = batch["tokens"]
    x = params["wte"][tokens] * jnp.sqrt(C)
    x = x + sinusoids(2 * S, C)[:, : tokens.shape[1], :]
    return decoder(params, x, batch["labels"])


@model(
    "positions",
    "learned table, taken by broadcast ids",
    "huggingface/transformers, src/transformers/models/gpt2/modeling_flax_gpt2.py",
    init=decoder_init,
)
def learned(params, batch):
    b, s = batch["tokens"].shape
    position_ids = jnp.broadcast_to(jnp.arange(s)[None, :], (b, s))
    words = jnp.take(params["wte"], batch["tokens"].astype("i4"), axis=0)
    places = jnp.take(params["wpe"], position_ids.astype("i4"), axis=0)
    return decoder(params, words + places, batch["labels"])


SLOPES = 2.0 ** (-8.0 / H * np.arange(1, H + 1))
ALIBI = SLOPES[:, None, None] * np.arange(S)[None, None, :]
ALIBI = np.where(np.tril(np.ones((S, S))), np.repeat(ALIBI, S, axis=1), -1e10)


@layer(
    "positions",
    "alibi slopes in a bias made once",
    "lucidrains/PaLM-jax, palm_jax/palm_lite.py",
    square,
)
def alibi(p, x):
    n = x.shape[-2]
    q, k, v = (jnp.moveaxis(y, 2, 1) for y in projected(p, x))
    scores = jnp.einsum("...td,...sd->...ts", q * D**-0.5, k)
    scores = scores + jnp.asarray(ALIBI, dtype=scores.dtype)[..., :n, :n]
    out = jnp.einsum("...ts,...sd->...td", jax.nn.softmax(scores, axis=-1), v)
    return jnp.moveaxis(out, 1, 2).reshape(x.shape) @ p["o"]
