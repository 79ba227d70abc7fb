"""Encoders, and decoders that read them or a memory, in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.jax_zoo_models.decoders import (
    LAYERS,
    C,
    D,
    H,
    S,
    V,
    cross_entropy,
    layer_norm,
    rms_norm,
)
from benchmarks.jax_zoo_models.frame import SAMPLES, Parts, classes, drawn, kind, numbers, tokens


@kind("T5", "plain JAX", "github.com/google-research/t5x, examples/t5/layers.py")
def t5(layers=LAYERS):
    """Encoder and decoder, relative buckets, unscaled products, tied head divided by the root."""
    buckets, farthest = 8, 16

    def bucket_of(relative, bidirectional):
        ret, n = 0, -relative
        half = buckets
        if bidirectional:
            half //= 2
            ret += (n < 0).astype(np.int32) * half
            n = np.abs(n)
        else:
            n = np.maximum(n, 0)
        exact = half // 2
        large = exact + (
            np.log(n.astype(np.float32) / exact + np.finfo(np.float32).eps)
            / np.log(farthest / exact)
            * (half - exact)
        ).astype(np.int32)
        return ret + np.where(n < exact, n, np.minimum(large, half - 1))

    def relative_bias(embedding, q, k, bidirectional):
        relative = np.arange(k)[None, :] - np.arange(q)[:, None]
        rp_bucket = bucket_of(relative, bidirectional)
        one_hot = jax.lax.broadcasted_iota(jnp.int32, (buckets, 1, 1), 0) == rp_bucket[None]
        values = jax.lax.dot_general(
            embedding, one_hot.astype(embedding.dtype), (((1,), (0,)), ((), ()))
        )
        return values[None]

    def attend(p, x, memory, bias):
        q, k, v = (
            jnp.einsum("bsc,chd->bshd", y, p[n])
            for n, y in zip("qkv", (x, memory, memory), strict=True)
        )
        weights = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        weights = weights if bias is None else weights + bias
        weights = jax.nn.softmax(weights)
        return jnp.einsum("bhqd,hdc->bqc", jnp.einsum("bhqk,bkhd->bhqd", weights, v), p["o"])

    def mlp(p, x):
        return (jax.nn.gelu(x @ p["wi_0"]) * (x @ p["wi_1"])) @ p["wo"]

    def padding(ids, q):
        allowed = (ids > 0)[:, None, None, :] * jnp.ones((1, 1, q, 1), bool)
        return jnp.where(allowed, 0.0, -1e10)

    def loss(params, batch):
        source, target = batch["inputs"], batch["targets"]
        shifted = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
        s, t = source.shape[1], target.shape[1]
        bias = relative_bias(params["encoder_bias"], s, s, True) + padding(source, s)
        x = params["shared"][source]
        for p in params["encoder"]:
            h = rms_norm(x, p["norm1"])
            x = x + attend(p["self"], h, h, bias)
            x = x + mlp(p["mlp"], rms_norm(x, p["norm2"]))
        memory = rms_norm(x, params["encoder_norm"])
        causal = jnp.where(jnp.tril(jnp.ones((t, t), bool)), 0.0, -1e10)
        bias = relative_bias(params["decoder_bias"], t, t, False) + causal
        y = params["shared"][shifted]
        for p in params["decoder"]:
            h = rms_norm(y, p["norm1"])
            y = y + attend(p["self"], h, h, bias)
            y = y + attend(p["cross"], rms_norm(y, p["norm3"]), memory, padding(source, t))
            y = y + mlp(p["mlp"], rms_norm(y, p["norm2"]))
        y = rms_norm(y, params["decoder_norm"]) / np.sqrt(C)
        logits = y @ params["shared"].T
        weights = (target > 0).astype(logits.dtype)
        one_hot = jax.nn.one_hot(target, V, dtype=logits.dtype)
        losses = -jnp.sum(one_hot * jax.nn.log_softmax(logits), axis=-1)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        return jnp.sum((losses + 1e-4 * jnp.square(log_z)) * weights) / jnp.sum(weights)

    attention = {**{n: (C, H, D) for n in "qkv"}, "o": (H, D, C)}
    block = {
        "norm1": (C,),
        "norm2": (C,),
        "self": attention,
        "mlp": {"wi_0": (C, 64), "wi_1": (C, 64), "wo": (64, C)},
    }
    shapes = {
        "shared": (V, C),
        "encoder_bias": (H, buckets),
        "decoder_bias": (H, buckets),
        "encoder": [block] * layers,
        "decoder": [{**block, "cross": attention, "norm3": (C,)}] * layers,
        "encoder_norm": (C,),
        "decoder_norm": (C,),
    }
    return Parts(lambda key: drawn(key, shapes), loss, tokens(S, V, "inputs", "targets"))


@kind("Transformer-XL", "plain JAX", "github.com/kimiyoung/transformer-xl, tf/model.py")
def transformer_xl():
    """Memory of the segment before as a batch entry, relative shift of scores, two biases."""
    m = 4

    def sinusoid(length, dtype):
        inverse = 1.0 / (10000 ** (jnp.arange(0, C, 2.0, dtype=dtype) / C))
        angle = jnp.einsum("i,j->ij", jnp.arange(length - 1, -1, -1.0, dtype=dtype), inverse)
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)

    def rel_shift(x):
        b, h, q, k = x.shape
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (1, 0)))
        return x.reshape(b, h, k + 1, q)[:, :, 1:].reshape(b, h, q, k)

    def attention(p, w, mems, r, u, v):
        cat = jnp.concatenate([mems, w], axis=1)
        heads = jnp.einsum("bsc,cnhd->nbshd", cat, p["qkv"])
        q, k, value = heads[0][:, -S:], heads[1], heads[2]
        r_k = jnp.einsum("rc,chd->rhd", r, p["r"])
        ac = jnp.einsum("bihd,bjhd->bhij", q + u, k)
        bd = rel_shift(jnp.einsum("bihd,jhd->bhij", q + v, r_k))
        mask = jnp.triu(jnp.ones((S, S + m)), 1 + m)
        score = (ac + bd) / D**0.5 * (1 - mask) - 1e30 * mask
        prob = jax.nn.softmax(score, axis=-1)
        return jnp.einsum("bhij,bjhd,hdc->bic", prob, value, p["o"])

    def loss(params, batch):
        x = params["table"][batch["tokens"]] * C**0.5
        r = sinusoid(S + m, x.dtype)
        for i, p in enumerate(params["layers"]):
            mems = jax.lax.stop_gradient(batch["memory"][:, i])
            y = attention(p, x, mems, r, params["u"], params["v"])
            x = layer_norm(x + y, **p["norm1"])
            y = jax.nn.relu(x @ p["up"] + p["b1"]) @ p["down"] + p["b2"]
            x = layer_norm(x + y, **p["norm2"])
        return cross_entropy(x @ params["table"].T + params["bias"], batch["labels"])

    norm = {"g": (C,), "b": (C,)}
    layer = {
        "qkv": (C, 3, H, D),
        "r": (C, H, D),
        "o": (H, D, C),
        "norm1": norm,
        "norm2": norm,
        "up": (C, 64),
        "b1": (64,),
        "down": (64, C),
        "b2": (C,),
    }
    shapes = {
        "table": (V, C),
        "u": (H, D),
        "v": (H, D),
        "bias": (V,),
        "layers": [layer] * LAYERS,
    }

    def batch(draws):
        ids = tokens(S, V, "tokens", "labels")(draws)
        return {**ids, "memory": numbers(draws, LAYERS, m, C)}

    return Parts(lambda key: drawn(key, shapes), loss, batch)


@kind("BERT", "plain JAX", "github.com/huggingface/transformers, modeling_flax_bert.py")
def bert():
    """Masked words predicted at places that are gathered, a padding mask, two segments."""
    places = 2

    def dense(p, x):
        return x @ p["kernel"] + p["bias"]

    def attention(p, x, bias):
        b, s, _ = x.shape
        q, k, v = (dense(p[n], x).reshape((b, s, H, D)) for n in ("query", "key", "value"))
        q = q / jnp.sqrt(D).astype(x.dtype)
        weights = jnp.einsum("...qhd,...khd->...hqk", q, k) + bias
        weights = jax.nn.softmax(weights).astype(x.dtype)
        return jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape((b, s, -1))

    def loss(params, batch):
        e = params["embeddings"]
        ids = jnp.arange(S)[None]
        x = (
            jnp.take(e["word"], batch["input_ids"], axis=0)
            + jnp.take(e["position"], ids, axis=0)
            + jnp.take(e["type"], batch["token_type_ids"], axis=0)
        )
        x = layer_norm(x, **e["norm"], eps=1e-12)
        mask = jnp.expand_dims(batch["attention_mask"], axis=(-3, -2))
        bias = jax.lax.select(
            mask > 0,
            jnp.full(mask.shape, 0.0).astype(x.dtype),
            jnp.full(mask.shape, jnp.finfo(x.dtype).min).astype(x.dtype),
        )
        for p in params["layers"]:
            y = dense(p["output"], attention(p["self"], x, bias))
            x = layer_norm(y + x, **p["norm1"], eps=1e-12)
            y = dense(p["down"], jax.nn.gelu(dense(p["up"], x), approximate=False))
            x = layer_norm(y + x, **p["norm2"], eps=1e-12)
        spots = batch["positions"]
        picked = jnp.take_along_axis(x, spots[..., None], axis=1)
        h = jax.nn.gelu(dense(params["transform"], picked), approximate=False)
        logits = layer_norm(h, **params["norm"], eps=1e-12) @ e["word"].T + params["bias"]
        chosen = jax.nn.one_hot(batch["labels"], V, dtype=logits.dtype)
        words = -jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1).mean()
        pooled = jnp.tanh(dense(params["pooler"], x[:, 0]))
        scores = jax.nn.log_softmax(dense(params["next"], pooled))
        following = -jnp.take_along_axis(scores, batch["next"][:, None], axis=-1).mean()
        return words + following

    def affine(k, n):
        return {"kernel": (k, n), "bias": (n,)}

    norm = {"g": (C,), "b": (C,)}
    layer = {
        "self": {n: affine(C, C) for n in ("query", "key", "value")},
        "output": affine(C, C),
        "up": affine(C, 64),
        "down": affine(64, C),
        "norm1": norm,
        "norm2": norm,
    }
    shapes = {
        "embeddings": {"word": (V, C), "position": (S, C), "type": (2, C), "norm": norm},
        "layers": [layer] * LAYERS,
        "transform": affine(C, C),
        "norm": norm,
        "bias": (V,),
        "pooler": affine(C, C),
        "next": affine(C, 2),
    }

    def batch(draws):
        lengths = draws.integers(3, S + 1, SAMPLES)
        return {
            "input_ids": classes(draws, V, S),
            "token_type_ids": classes(draws, 2, S),
            "attention_mask": (np.arange(S) < lengths[:, None]).astype(np.int32),
            "positions": classes(draws, S, places),
            "labels": classes(draws, V, places),
            "next": classes(draws, 2),
        }

    return Parts(lambda key: drawn(key, shapes), loss, batch)
