"""Mixtures of experts in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.jax_zoo_models.decoders import LAYERS, C, S, V, cross_entropy, rms_norm
from benchmarks.jax_zoo_models.frame import Parts, drawn, kind, tokens

E, F = 8, 32


def mixing(p, x):
    """Causal attention of 8 heads without positions."""
    s = x.shape[1]
    q, k, v = (jnp.einsum("bsc,chd->bshd", x, p[n]) for n in "qkv")
    return jnp.einsum(
        "bshd,hdc->bsc", jax.nn.dot_product_attention(q, k, v, is_causal=s > 1), p["o"]
    )


ATTENTION = {**{n: (C, 8, C // 8) for n in "qkv"}, "o": (8, C // 8, C)}


def language_model(experts, shapes):
    """``experts(p, x) -> (y, loss)`` in place of the MLP of a decoder."""

    def loss(params, batch):
        x, total = params["embed"][batch["tokens"]], 0.0
        for p in params["layers"]:
            x = x + mixing(p["attention"], rms_norm(x, p["norm1"]))
            y, balance = experts(p["experts"], rms_norm(x, p["norm2"]))
            x, total = x + y, total + balance
        logits = rms_norm(x, params["norm"]) @ params["head"]
        return cross_entropy(logits, batch["labels"]) + 0.01 * total

    layer = {"attention": ATTENTION, "norm1": (C,), "norm2": (C,), "experts": shapes}
    tree = {"embed": (V, C), "layers": [layer] * LAYERS, "norm": (C,), "head": (C, V)}
    return Parts(lambda key: drawn(key, tree), loss, tokens(S, V, "tokens", "labels"))


@kind("Switch Transformer", "plain JAX", "github.com/google/flaxformer, architectures/moe")
def switch():
    """Tokens to experts by one-hot masks with a capacity, each sample a group of tokens."""
    capacity = 2

    def experts(p, x):
        probs = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, p["router"]), axis=-1)
        index = jnp.argmax(probs, axis=-1)
        mask = jax.nn.one_hot(index, E, dtype=x.dtype)
        density, proxy = mask.mean(axis=-2), probs.mean(axis=-2)
        balance = jnp.mean(density * proxy) * E**2
        place = jnp.cumsum(mask, axis=-2) * mask - 1.0
        kept = mask * (place < capacity) * (place >= 0)
        slots = jax.nn.one_hot(place.max(-1).astype(jnp.int32), capacity, dtype=x.dtype)
        dispatch = kept[..., None] * slots[..., None, :]
        combine = dispatch * jnp.max(probs, axis=-1)[..., None, None]
        sent = jnp.einsum("gsm,gsec->egcm", x, dispatch)
        h = jax.nn.relu(jnp.einsum("egcm,emf->egcf", sent, p["wi"]))
        back = jnp.einsum("egcf,efm->egcm", h, p["wo"])
        return jnp.einsum("egcm,gsec->gsm", back, combine), balance

    return language_model(experts, {"router": (C, E), "wi": (E, C, F), "wo": (E, F, C)})


@kind("Mixtral", "plain JAX", "github.com/AI-Hypercomputer/maxtext, layers/moe.py (dense_matmul)")
def mixtral():
    """Every expert on every token, weighted by the two that top_k chose."""

    def experts(p, x):
        gates = x @ p["gate"]
        weights, chosen = lax.top_k(gates, 2)
        weights = jax.nn.softmax(weights, axis=-1)
        update = jnp.zeros_like(gates)
        b, s = x.shape[:2]
        where = (jnp.arange(b)[:, None, None], jnp.arange(s)[None, :, None], chosen)
        spread = update.at[where].set(weights)
        w0 = jnp.einsum("BSM,EMH->BSEH", x, p["wi_0"])
        w1 = jnp.einsum("BSM,EMH->BSEH", x, p["wi_1"])
        out = jnp.einsum("BSEH,EHM->BSEM", jax.nn.silu(w0) * w1, p["wo"])
        return jnp.einsum("BSEM,BSE->BSM", out, spread), 0.0

    shapes = {"gate": (C, E), "wi_0": (E, C, F), "wi_1": (E, C, F), "wo": (E, F, C)}
    return language_model(experts, shapes)


@kind(
    "dropless experts",
    "plain JAX",
    "github.com/AI-Hypercomputer/maxtext, layers/moe.py (sparse)",
    joined=False,
)
def dropless():
    """Tokens sorted by expert, products by ragged_dot, and back."""

    def experts(p, x):
        b, s, m = x.shape
        tokens_of = x.reshape(b * s, m)
        weights, chosen = lax.top_k(tokens_of @ p["gate"], 2)
        weights = jax.nn.softmax(weights, axis=-1)
        flat = jnp.ravel(chosen)
        order = jnp.argsort(flat)
        ordered = jnp.take(tokens_of, indices=order // 2, axis=0)
        sizes = jnp.bincount(flat, length=E)
        h = jax.nn.silu(lax.ragged_dot(ordered, p["wi_0"], sizes))
        h = h * lax.ragged_dot(ordered, p["wi_1"], sizes)
        out = lax.ragged_dot(h, p["wo"], sizes)
        out = jnp.take(out, indices=jnp.argsort(order), axis=0)
        out = jnp.einsum("BKE,BK->BE", out.reshape(-1, 2, m), weights)
        return out.reshape(b, s, m), 0.0

    shapes = {"gate": (C, E), "wi_0": (E, C, F), "wi_1": (E, C, F), "wo": (E, F, C)}
    return language_model(experts, shapes)
