"""Trees of parameters, as people hold them, and words sent to experts."""

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.spellings.jax.frame import (
    LAYERS,
    C,
    H,
    V,
    dense,
    layer,
    linear,
    model,
    next_word,
    norm,
)


def attention(q, k, v):
    """Causal, of [b, s, c]."""
    b, s, c = q.shape
    q, k, v = (y.reshape(b, s, H, c // H) for y in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, s, c)


def glorot(key, *shape):
    return jax.random.normal(key, shape) / shape[-2] ** 0.5


# parameters


def flat_names(key):
    params = {}
    for name, shape in [
        ("transformer/embed/w", (V, C)),
        *(
            (f"transformer/h{i}/{part}/w", shape)
            for i in range(LAYERS)
            for part, shape in [
                ("attn/qkv", (C, 3 * C)),
                ("attn/out", (C, C)),
                ("mlp/up", (C, 2 * C)),
                ("mlp/down", (2 * C, C)),
            ]
        ),
        ("transformer/head/w", (C, V)),
    ]:
        key, one = jax.random.split(key)
        params[name] = glorot(one, *shape)
        if "embed" not in name:
            params[name.removesuffix("w") + "b"] = jnp.zeros(shape[-1])
    return params


def scope(params, prefix):
    """What is under ``prefix/``, by what follows it."""
    return {k[len(prefix) + 1 :]: v for k, v in params.items() if k.startswith(prefix + "/")}


@model(
    "parameters",
    "one flat dict of names with slashes",
    "google-research/big_vision, big_vision/utils.py, trees flattened with names",
    init=flat_names,
)
def names_with_slashes(params, batch):
    def affine(p, name, x):
        return x @ p[f"{name}/w"] + p[f"{name}/b"]

    params = scope(params, "transformer")
    x = params["embed/w"][batch["tokens"]] * V**0.5
    for i in range(LAYERS):
        p = scope(params, f"h{i}")
        x = x + affine(p, "attn/out", attention(*jnp.split(affine(p, "attn/qkv", norm(x)), 3, -1)))
        x = x + affine(p, "mlp/down", jax.nn.gelu(affine(p, "mlp/up", norm(x))))
    return next_word(affine(params, "head", norm(x)), batch["labels"])


class Attention(NamedTuple):
    scale: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    o: jax.Array


class Feed(NamedTuple):
    scale: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array


class Layer(NamedTuple):
    attention: Attention
    feed: Feed


class Weights(NamedTuple):
    embeddings: jax.Array
    layers: list[Layer]
    scale: jax.Array
    output: jax.Array


def named_tuples(key):
    embed, out, *keys = jax.random.split(key, 2 + LAYERS)
    layers = []
    for key in keys:
        *four, gate, up, down = jax.random.split(key, 7)
        feed = Feed(
            scale=jnp.ones(C),
            gate=glorot(gate, C, 2 * C),
            up=glorot(up, C, 2 * C),
            down=glorot(down, 2 * C, C),
        )
        layers.append(Layer(Attention(jnp.ones(C), *(glorot(k, C, C) for k in four)), feed))
    return Weights(jax.random.normal(embed, (V, C)), layers, jnp.ones(C), glorot(out, V, C))


@model(
    "parameters",
    "NamedTuple that holds a list of NamedTuples",
    "xjdr-alt/entropix, entropix/weights.py and model.py",
    init=named_tuples,
)
def weights_by_attribute(params, batch):
    def rms_norm(x, scale):
        return scale * (x * lax.rsqrt(lax.integer_pow(x, 2).mean(-1, keepdims=True) + 1e-6))

    h = params.embeddings[batch["tokens"]]
    for attn, feed in params.layers:
        x = rms_norm(h, attn.scale)
        h = h + jnp.dot(attention(x @ attn.q, x @ attn.k, x @ attn.v), attn.o)
        x = rms_norm(h, feed.scale)
        h = h + jnp.dot(jax.nn.silu(jnp.dot(x, feed.gate)) * jnp.dot(x, feed.up), feed.down)
    return next_word(jnp.dot(rms_norm(h, params.scale), params.output.T), batch["labels"])


@dataclass
class Linear:
    w: Any
    b: Any

    def __call__(self, x):
        return x @ self.w + self.b

    @classmethod
    def create(cls, key, n_in, n_out):
        return cls(glorot(key, n_in, n_out), jnp.zeros(n_out))


@dataclass
class Block:
    qkv: Linear
    out: Linear
    up: Linear
    down: Linear
    activation: str

    def __call__(self, x):
        x = x + self.out(attention(*jnp.split(self.qkv(norm(x)), 3, axis=-1)))
        return x + self.down(getattr(jax.nn, self.activation)(self.up(norm(x))))


@dataclass
class Net:
    embed: Any
    blocks: list
    head: Linear

    def __call__(self, ids):
        x = self.embed[ids]
        for block in self.blocks:
            x = block(x)
        return self.head(norm(x))


jax.tree_util.register_dataclass(Linear, data_fields=["w", "b"], meta_fields=[])
jax.tree_util.register_dataclass(
    Block, data_fields=["qkv", "out", "up", "down"], meta_fields=["activation"]
)
jax.tree_util.register_dataclass(Net, data_fields=["embed", "blocks", "head"], meta_fields=[])


def make_net(key):
    embed, head, *keys = jax.random.split(key, 2 + LAYERS)
    blocks = []
    for k in keys:
        a, b, c, d = jax.random.split(k, 4)
        blocks.append(
            Block(
                Linear.create(a, C, 3 * C),
                Linear.create(b, C, C),
                Linear.create(c, C, 2 * C),
                Linear.create(d, 2 * C, C),
                activation="silu",
            )
        )
    return Net(jax.random.normal(embed, (V, C)), blocks, Linear.create(head, C, V))


@model(
    "parameters",
    "registered dataclasses that are called, one field static",
    "JAX documentation, Custom pytree nodes, jax.tree_util.register_dataclass",
    init=make_net,
)
def dataclasses_called(net, batch):
    return next_word(net(batch["tokens"]), batch["labels"])


def pairs(key):
    sizes = [V, C] + [C, C] * LAYERS + [C, V]
    embed, *keys = jax.random.split(key, 2 + LAYERS)
    shapes = list(zip(sizes[2::2], sizes[3::2], strict=True))
    return [
        (jax.random.normal(embed, (V, C)),),
        *((glorot(k, m, n), jnp.zeros(n)) for k, (m, n) in zip(keys, shapes, strict=True)),
    ]


@model(
    "parameters",
    "list of tuples, the last taken off",
    "JAX documentation, Training a simple neural network; jax/example_libraries/stax.py",
    init=pairs,
)
def list_of_tuples(params, batch):
    (embed,), *hidden, (final_w, final_b) = params
    activations = embed[batch["tokens"]]
    for w, b in hidden:
        outputs = jnp.dot(norm(activations), w) + b
        activations = activations + attention(outputs, outputs, jax.nn.relu(outputs))
    logits = jnp.dot(activations, final_w) + final_b
    return next_word(logits, batch["labels"])


def made_by_vmap(key):
    def one(key):
        qkv, out, up, down = jax.random.split(key, 4)
        return {
            "qkv": dense(qkv, C, 3 * C),
            "out": dense(out, C, C),
            "mlp": (dense(up, C, 2 * C), dense(down, 2 * C, C)),
        }

    embed, head, blocks = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(embed, (V, C)),
        "blocks": jax.vmap(one)(jax.random.split(blocks, LAYERS)),
        "head": dense(head, C, V),
    }


@model(
    "parameters",
    "stacked by vmap of the layer's init, unstacked to be used",
    "patrick-kidger/equinox, docs/tricks.md, layers made under vmap",
    init=made_by_vmap,
)
def unstacked(params, batch):
    x = params["embed"][batch["tokens"]]
    for i in range(LAYERS):
        p = jax.tree.map(operator.itemgetter(i), params["blocks"])
        x = x + linear(p["out"], attention(*jnp.split(linear(p["qkv"], norm(x)), 3, axis=-1)))
        up, down = p["mlp"]
        x = x + linear(down, jax.nn.gelu(linear(up, norm(x))))
    return next_word(linear(params["head"], norm(x)), batch["labels"])


# routing

EXPERTS = 4


def experts(key):
    gate, up, down = jax.random.split(key, 3)
    return {
        "gate": glorot(gate, C, EXPERTS),
        "wi": glorot(up, EXPERTS, C, 2 * C),
        "wo": glorot(down, EXPERTS, 2 * C, C),
    }


@layer(
    "routing",
    "weights of top_k set into zeros, all experts computed",
    "AI-Hypercomputer/maxtext, MaxText/layers/moe.py, reshape_and_update_weights",
    experts,
)
def all_computed(p, x):
    x = norm(x)
    best, chosen = lax.top_k(x @ p["gate"], 2)
    best = jax.nn.softmax(best.astype(jnp.float32), axis=-1).astype(x.dtype)
    b, s, _ = x.shape
    sample, word = jnp.arange(b)[:, None, None], jnp.arange(s)[:, None]
    weights = jnp.zeros((b, s, EXPERTS), x.dtype).at[sample, word, chosen].set(best)
    hidden = jax.nn.gelu(jnp.einsum("bsc,ecf->bsef", x, p["wi"]))
    outputs = jnp.einsum("bsef,efc->bsec", hidden, p["wo"])
    return jnp.einsum("bsec,bse->bsc", outputs, weights)


@layer(
    "routing",
    "argmax, place by cumsum, dispatch by one_hot einsum",
    "google/flaxformer, flaxformer/architectures/moe/routing.py, masked matmul",
    experts,
)
def dispatched(p, x, capacity_factor=1.5):
    x = norm(x)
    capacity = int(capacity_factor * x.shape[1] / EXPERTS)
    probs = jax.nn.softmax(x @ p["gate"], axis=-1)
    expert_index = jnp.argmax(probs, axis=-1)
    mask = jax.nn.one_hot(expert_index, EXPERTS, dtype=jnp.int32)
    place = jnp.cumsum(mask, axis=1) * mask - 1
    dispatch = jax.nn.one_hot(place, capacity, dtype=x.dtype)
    combine = jnp.max(probs, axis=-1)[..., None, None] * dispatch
    inputs = jnp.einsum("gtm,gtec->egcm", x, dispatch)
    outputs = jax.vmap(lambda wi, wo, h: jax.nn.relu(h @ wi) @ wo)(p["wi"], p["wo"], inputs)
    return jnp.einsum("egcm,gtec->gtm", outputs, combine)


@layer(
    "routing",
    "argsort of the experts' numbers and ragged_dot",
    "stanford-crfm/levanter, src/levanter/models/mixtral.py",
    experts,
)
def sorted_by_expert(p, x, k=2):
    shape = x.shape
    x = norm(x).reshape(-1, C)
    topk_weights, topk_idx = lax.top_k(jax.nn.softmax(x @ p["gate"], axis=-1), k)
    topk_weights = topk_weights / topk_weights.sum(-1, keepdims=True)
    flat_idx = topk_idx.reshape(-1)
    order = jnp.argsort(flat_idx)
    repeated = jnp.take(x, order // k, axis=0)
    group_sizes = jnp.bincount(flat_idx, length=EXPERTS).astype(jnp.int32)
    hidden = jax.nn.silu(lax.ragged_dot(repeated, p["wi"], group_sizes))
    outputs = lax.ragged_dot(hidden, p["wo"], group_sizes)
    unsorted = jnp.take(outputs, jnp.argsort(order), axis=0).reshape(-1, k, C)
    return jnp.einsum("tkc,tk->tc", unsorted, topk_weights).reshape(shape)


def slots(key, per_expert=2):
    mlps, mu = jax.random.split(key)
    params = experts(mlps)
    del params["gate"]
    return {**params, "mu": jax.random.normal(mu, (C, EXPERTS, per_expert)), "scale": jnp.ones(())}


@layer(
    "routing",
    "soft slots, softmax over words and over slots",
    "google-research/vmoe, vmoe/projects/soft_moe/router.py",
    slots,
)
def soft_slots(p, x):
    inputs = norm(x)
    unit = inputs / jnp.sqrt(jnp.sum(jnp.square(inputs), axis=-1, keepdims=True) + 1e-6)
    mu = p["mu"] / jnp.sqrt(jnp.sum(jnp.square(p["mu"]), axis=0, keepdims=True) + 1e-6)
    logits = jnp.einsum("gmd,dnp->gmnp", unit, p["scale"] * C**0.5 * mu)
    dispatch = jax.nn.softmax(logits, axis=1)
    combine = jax.nn.softmax(logits, axis=(2, 3))
    slotted = jnp.einsum("gmd,gmnp->gnpd", inputs, dispatch)
    hidden = jax.nn.gelu(jnp.einsum("gnpd,ndh->gnph", slotted, p["wi"]))
    outputs = jnp.einsum("gnph,nhd->gnpd", hidden, p["wo"])
    return jnp.einsum("gnpd,gmnp->gmd", outputs, combine)


def separate_experts(key):
    gate, *keys = jax.random.split(key, 1 + EXPERTS)
    return {
        "gate": dense(gate, C, EXPERTS),
        "experts": [(dense(k, C, 2 * C), dense(k, 2 * C, C)) for k in keys],
    }


@layer(
    "routing",
    "loop over the experts, where says whose a word is",
    "huggingface/transformers, src/transformers/models/mixtral/modeling_mixtral.py, in jnp",
    separate_experts,
)
def loop_with_where(p, x):
    hidden_states = norm(x)
    routing_weights = jax.nn.softmax(linear(p["gate"], hidden_states), axis=-1)
    chosen_weight = routing_weights.max(axis=-1, keepdims=True)
    selected = routing_weights.argmax(axis=-1)
    final = jnp.zeros_like(x)
    for i, (up, down) in enumerate(p["experts"]):
        current = linear(down, jax.nn.silu(linear(up, hidden_states)))
        final = jnp.where((selected == i)[..., None], current * chosen_weight, final)
    return final
