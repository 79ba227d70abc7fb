"""What stands around attention: norms, gates, residuals, noise and numbers of few bits."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.spellings.jax.frame import (
    LAYERS,
    B,
    C,
    H,
    V,
    dense,
    layer,
    linear,
    model,
    next_word,
    norm,
    tokens,
)

EPS = 1e-5

# norms


def scaled(key):
    return {"scale": jnp.ones(C), "offset": jnp.zeros(C), "mix": dense(key, C, C)}


@layer(
    "norms",
    "layer norm of mean, var and rsqrt",
    "kingoflolz/mesh-transformer-jax, mesh_transformer/layers.py, ReplicatedLayerNorm",
    scaled,
)
def layer_norm(p, x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    scale = jnp.broadcast_to(p["scale"], x.shape)
    offset = jnp.broadcast_to(p["offset"], x.shape)
    inv = scale * lax.rsqrt(variance + EPS)
    return linear(p["mix"], inv * (x - jnp.broadcast_to(mean, x.shape)) + offset)


def scale_only(key):
    return {"scale": jnp.zeros(C), "mix": dense(key, C, C)}


@layer(
    "norms",
    "rms norm in float32, scale as one plus a weight",
    "google-deepmind/gemma, gemma/gm/nn/_layers.py, RMSNorm",
    scale_only,
)
def rms_norm(p, x):
    x = jnp.asarray(x, jnp.float32)
    mean2 = jnp.mean(lax.square(x), axis=-1, keepdims=True)
    y = jnp.asarray(x * lax.rsqrt(mean2 + 1e-6), x.dtype)
    scale = jnp.expand_dims(p["scale"], axis=range(y.ndim - 1))
    return linear(p["mix"], y * (1 + scale))


@layer("norms", "standardize of jax.nn", "JAX documentation, jax.nn.standardize", scaled)
def standardized(p, x):
    x = jax.nn.standardize(x, axis=-1, epsilon=EPS) * p["scale"] + p["offset"]
    return jnp.tanh(linear(p["mix"], x))


@layer(
    "norms",
    "group norm by the mean of squares less the squared mean",
    "google/flax, flax/linen/normalization.py, GroupNorm",
    scaled,
)
def group_norm(p, x):
    b, s, c = x.shape
    groups = x.reshape(b, s, 4, c // 4)
    mu = groups.mean(axis=(1, 3), keepdims=True)
    mu2 = jnp.mean(lax.square(groups), axis=(1, 3), keepdims=True)
    var = jnp.maximum(0.0, mu2 - lax.square(mu))
    y = ((groups - mu) * lax.rsqrt(var + EPS)).reshape(x.shape)
    return linear(p["mix"], y * p["scale"].reshape(1, 1, -1) + p["offset"].reshape(1, 1, -1))


def beta_gamma(key):
    return jnp.zeros(C), jnp.ones(C), jax.random.normal(key, (C, C)) / C**0.5


@layer(
    "norms",
    "batch norm of the batch at hand",
    "jax-ml/jax, jax/example_libraries/stax.py, BatchNorm",
    beta_gamma,
)
def batch_norm(params, x, axis=(0, 1)):
    beta, gamma, w = params
    ed = tuple(None if i in axis else slice(None) for i in range(jnp.ndim(x)))
    z = (x - jnp.mean(x, axis, keepdims=True)) / jnp.sqrt(jnp.var(x, axis, keepdims=True) + EPS)
    return jnp.dot(gamma[ed] * z + beta[ed], w)


# gates and activations


def three_weights(key):
    w1, w2, w3 = jax.random.split(key, 3)
    return {
        "w1": jax.random.normal(w1, (2 * C, C)) / C**0.5,
        "w2": jax.random.normal(w2, (C, 2 * C)) / C**0.5,
        "w3": jax.random.normal(w3, (2 * C, C)) / C**0.5,
    }


@layer(
    "gates and activations",
    "silu of one product times another, weights transposed",
    "xjdr-alt/entropix, entropix/model.py, feed_forward",
    three_weights,
)
def swiglu(p, x):
    x = norm(x)
    return jnp.dot(jax.nn.silu(jnp.dot(x, p["w1"].T)) * jnp.dot(x, p["w3"].T), p["w2"].T)


def gating(key):
    gate, out = jax.random.split(key)
    return {
        "gating": jax.random.normal(gate, (2, C, 2 * C)) / C**0.5,
        "out": jax.random.normal(out, (2 * C, C)) / C**0.5,
    }


@layer(
    "gates and activations",
    "gelu gate from two rows of one weight",
    "google-deepmind/gemma, gemma/gm/nn/_modules.py, FeedForward",
    gating,
)
def geglu(p, x):
    both = jnp.einsum("...c,gcf->...gf", norm(x), p["gating"])
    return jnp.einsum("...f,fc->...c", jax.nn.gelu(both[..., 0, :]) * both[..., 1, :], p["out"])


@jax.custom_jvp
def smooth_relu(x):
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


@smooth_relu.defjvp
def smooth_relu_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return smooth_relu(x), jax.nn.sigmoid(x) * dx


def up_and_down(key):
    up, down = jax.random.split(key)
    return {"up": dense(up, C, 2 * C), "down": dense(down, 2 * C, C)}


@layer(
    "gates and activations",
    "custom_jvp of an activation",
    "JAX documentation, Custom derivative rules for JAX-transformable functions",
    up_and_down,
)
def own_derivative(p, x):
    return linear(p["down"], smooth_relu(linear(p["up"], norm(x))))


@layer(
    "gates and activations",
    "square of relu, picked by name",
    "danijar/dreamerv3, embodied/jax/nets.py, act",
    up_and_down,
)
def relu_squared(p, x):
    def act(name):
        if name == "relu2":
            return lambda x: jnp.square(jax.nn.relu(x))
        return getattr(jax.nn, name)

    return linear(p["down"], act("relu2")(linear(p["up"], norm(x))))


def pieces(key):
    up, down = jax.random.split(key)
    return {"up": dense(up, C, 4 * C), "down": dense(down, 2 * C, C)}


@layer(
    "gates and activations",
    "maxout by reshape and max",
    "chainer/chainer, chainer/functions/activation/maxout.py, as written in jnp",
    pieces,
)
def maxout(p, x):
    h = linear(p["up"], norm(x))
    h = h.reshape(*h.shape[:-1], h.shape[-1] // 2, 2)
    return linear(p["down"], jnp.max(h, axis=-1))


# residuals


def attention_params(key):
    qkv, out = jax.random.split(key)
    return {"qkv": dense(qkv, C, 3 * C), "out": dense(out, C, C)}


def attend(p, x):
    q, k, v = (
        y.reshape(*x.shape[:2], H, C // H) for y in jnp.split(linear(p["qkv"], x), 3, axis=-1)
    )
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return linear(p["out"], y.reshape(x.shape))


def feed(p, x):
    return linear(p["down"], jax.nn.gelu(linear(p["up"], x)))


def block_params(key):
    attention, mlp = jax.random.split(key)
    return {"attention": attention_params(attention), "mlp": up_and_down(mlp)}


def stack(extra=lambda key: {}):
    """An ``init`` of embedding, four blocks and head; ``extra(key)`` joins each block."""

    def init(key):
        keys = jax.random.split(key, LAYERS + 2)
        return {
            "embed": jax.random.normal(keys[-2], (V, C)),
            "blocks": [{**block_params(k), **extra(k)} for k in keys[:LAYERS]],
            "head": dense(keys[-1], C, V),
        }

    return init


def affine(p, x):
    return norm(x) * p["gamma"] + p["beta"]


def two_norms(key):
    return {n: {"gamma": jnp.ones(C), "beta": jnp.zeros(C)} for n in ("norm1", "norm2")}


@model(
    "residuals",
    "norm of the sum, after each sublayer",
    "huggingface/transformers, src/transformers/models/bert/modeling_flax_bert.py",
    init=stack(two_norms),
)
def post_norm(params, batch):
    def sublayer(p, x, fn):
        return affine(p, x + fn(x))

    x = params["embed"][batch["tokens"]]
    for p in params["blocks"]:
        x = sublayer(p["norm1"], x, functools.partial(attend, p["attention"]))
        x = sublayer(p["norm2"], x, functools.partial(feed, p["mlp"]))
    return next_word(linear(params["head"], x), batch["labels"])


@model(
    "residuals",
    "attention and mlp of one norm, added at once",
    "kingoflolz/mesh-transformer-jax, mesh_transformer/layers.py and transformer_shard.py",
    init=stack(lambda key: {"norm": {"gamma": jnp.ones(C), "beta": jnp.zeros(C)}}),
)
def parallel(params, batch):
    def block(p, x):
        h = affine(p["norm"], x)
        return attend(p["attention"], h) + feed(p["mlp"], h)

    x = params["embed"][batch["tokens"]]
    for p in params["blocks"]:
        x = x + block(p, x)
    return next_word(linear(params["head"], norm(x)), batch["labels"])


@model(
    "residuals",
    "learned scale of each channel, begun small",
    "huggingface/transformers, src/transformers/models/dinov2/modeling_flax_dinov2.py, LayerScale",
    init=stack(lambda key: {"lambda1": 0.1 * jnp.ones(C), "lambda2": 0.1 * jnp.ones(C)}),
)
def layer_scale(params, batch):
    x = params["embed"][batch["tokens"]]
    for p in params["blocks"]:
        x = p["lambda1"] * attend(p["attention"], norm(x)) + x
        x = p["lambda2"] * feed(p["mlp"], norm(x)) + x
    return next_word(linear(params["head"], norm(x)), batch["labels"])


@model(
    "residuals",
    "two streams, each fed by the other",
    "google/trax, trax/layers/reversible.py, ReversibleHalfResidual",
    init=stack(),
)
def two_streams(params, batch):
    x = params["embed"][batch["tokens"]]
    stream = (x, x)
    for p in params["blocks"]:
        for fn in (functools.partial(attend, p["attention"]), functools.partial(feed, p["mlp"])):
            left, right = stream
            stream = (right, left + fn(norm(right)))
    x = jnp.mean(jnp.stack(stream), axis=0)
    return next_word(linear(params["head"], norm(x)), batch["labels"])


def with_joins(key):
    body, *joins = jax.random.split(key, 1 + LAYERS // 2)
    return {**stack()(body), "joins": [dense(k, 2 * C, C) for k in joins]}


@model(
    "residuals",
    "outputs kept in a tuple, popped and concatenated",
    "huggingface/diffusers, src/diffusers/models/unet_2d_condition_flax.py",
    init=with_joins,
)
def long_skips(params, batch):
    sample = params["embed"][batch["tokens"]]
    down, up = params["blocks"][: LAYERS // 2], params["blocks"][LAYERS // 2 :]
    res_samples = ()
    for p in down:
        sample = sample + attend(p["attention"], norm(sample))
        sample = sample + feed(p["mlp"], norm(sample))
        res_samples += (sample,)
    for p, join in zip(up, params["joins"], strict=True):
        res, res_samples = res_samples[-1], res_samples[:-1]
        sample = linear(join, jnp.concatenate((sample, res), axis=-1))
        sample = sample + attend(p["attention"], norm(sample))
        sample = sample + feed(p["mlp"], norm(sample))
    return next_word(linear(params["head"], norm(sample)), batch["labels"])


# dropout and noise


def with_step_key(step=0):
    """A raw key of two numbers for the step, without a batch dim."""
    return {**tokens(step), "rng": np.array([0, step], dtype=np.uint32)}


def with_sample_keys(step=0):
    """A raw key [b, 2] for each sample."""
    keys = jax.random.split(jax.random.PRNGKey(step), B)
    return {**tokens(step), "rng": np.asarray(keys)}


def with_step(step=0):
    return {**tokens(step), "step": np.asarray(step, dtype=np.int32)}


@model(
    "dropout and noise",
    "one key for the step, split for the layers, where of bernoulli",
    "jax-ml/jax, jax/example_libraries/stax.py, Dropout",
    init=stack(),
    batch=with_step_key,
    whole_inputs=("rng",),
)
def split_keys(params, batch):
    def dropout(rng, x, keep=0.9):
        kept = jax.random.bernoulli(rng, keep, x.shape)
        return jnp.where(kept, x / keep, 0)

    rng = batch["rng"]
    x = params["embed"][batch["tokens"]]
    for p in params["blocks"]:
        rng, first, second = jax.random.split(rng, 3)
        x = x + dropout(first, attend(p["attention"], norm(x)))
        x = x + dropout(second, feed(p["mlp"], norm(x)))
    return next_word(linear(params["head"], norm(x)), batch["labels"])


@model(
    "dropout and noise",
    "a key for each sample, the model under vmap",
    "patrick-kidger/equinox, examples/bert.ipynb, and equinox/nn/_dropout.py",
    init=stack(),
    batch=with_sample_keys,
)
def key_per_sample(params, batch):
    def dropout(x, key, p=0.1):
        q = 1 - p
        mask = jax.random.bernoulli(key, q, x.shape)
        return jnp.where(mask, x / q, 0)

    def one(ids, labels, key):
        x = params["embed"][ids][None]
        for p, layer_key in zip(params["blocks"], jax.random.split(key, LAYERS), strict=True):
            k1, k2 = jax.random.split(layer_key)
            x = x + dropout(attend(p["attention"], norm(x)), k1)
            x = x + dropout(feed(p["mlp"], norm(x)), k2)
        return next_word(linear(params["head"], norm(x)), labels[None])

    return jax.vmap(one)(batch["tokens"], batch["labels"], batch["rng"]).mean()


@model(
    "dropout and noise",
    "normal noise of a key folded with step and layer",
    "google/flax, examples/lm1b/train.py, fold_in of the step",
    init=stack(),
    batch=with_step,
    whole_inputs=("step",),
)
def folded_keys(params, batch):
    rng = jax.random.fold_in(jax.random.PRNGKey(0), batch["step"])
    x = params["embed"][batch["tokens"]]
    for i, p in enumerate(params["blocks"]):
        noise = jax.random.normal(jax.random.fold_in(rng, i), x.shape, x.dtype)
        x = x + 0.1 * noise
        x = x + attend(p["attention"], norm(x))
        x = x + feed(p["mlp"], norm(x))
    return next_word(linear(params["head"], norm(x)), batch["labels"])


@model(
    "dropout and noise",
    "whole branches dropped by floor of uniform, one draw a sample",
    "huggingface/transformers, src/transformers/models/beit/modeling_flax_beit.py, DropPath",
    init=stack(),
    batch=with_step_key,
    whole_inputs=("rng",),
)
def drop_path(params, batch):
    def drop(x, rng, rate):
        keep = 1.0 - rate
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        draws = jnp.floor(keep + jax.random.uniform(rng, shape, x.dtype))
        return x / keep * draws

    rngs = jax.random.split(jax.random.wrap_key_data(batch["rng"]), (LAYERS, 2))
    rates = [float(r) for r in np.linspace(0, 0.2, LAYERS)]
    x = params["embed"][batch["tokens"]]
    for p, (first, second), rate in zip(params["blocks"], rngs, rates, strict=True):
        x = x + drop(attend(p["attention"], norm(x)), first, rate)
        x = x + drop(feed(p["mlp"], norm(x)), second, rate)
    return next_word(linear(params["head"], norm(x)), batch["labels"])


def stacked(key):
    params = stack()(key)
    return {**params, "blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *params["blocks"])}


@model(
    "dropout and noise",
    "mask shared along the length, keys scanned beside the layers",
    "google/flax, flax/linen/stochastic.py, broadcast_dims",
    init=stacked,
)
def broadcast_mask(params, batch):
    def dropout(y, rng, keep=0.9):
        b, _, c = y.shape
        mask = jax.random.bernoulli(rng, p=keep, shape=(b, 1, c))
        return lax.select(jnp.broadcast_to(mask, y.shape), y / keep, jnp.zeros_like(y))

    def block(x, carried):
        p, rng = carried
        x = x + dropout(attend(p["attention"], norm(x)), rng)
        return x + feed(p["mlp"], norm(x)), None

    rngs = jax.random.split(jax.random.key(0), LAYERS)
    x, _ = lax.scan(block, params["embed"][batch["tokens"]], (params["blocks"], rngs))
    return next_word(linear(params["head"], norm(x)), batch["labels"])


# dtype changes


@layer(
    "dtype changes",
    "bfloat16 products around a float32 softmax",
    "xjdr-alt/entropix, entropix/model.py; huggingface/transformers, attention_softmax_in_fp32",
    attention_params,
)
def float32_softmax(p, x):
    b, s, c = x.shape
    dtype = x.dtype
    x = norm(x).astype(jnp.bfloat16)
    p = jax.tree.map(lambda w: w.astype(x.dtype), p)
    q, k, v = (y.reshape(b, s, H, c // H) for y in jnp.split(linear(p["qkv"], x), 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(c // H).astype(q.dtype)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(q.dtype)
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, s, c)
    return linear(p["out"], y).astype(dtype)


@model(
    "dtype changes",
    "every float of the tree cast by tree_map",
    "kingoflolz/mesh-transformer-jax, mesh_transformer/util.py, to_bf16",
    init=stack(),
)
def cast_tree(params, batch):
    def to_bf16(t):
        return jax.tree_util.tree_map(
            lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, t
        )

    params = to_bf16(params)
    x = params["embed"][batch["tokens"]]
    for p in params["blocks"]:
        x = x + attend(p["attention"], norm(x))
        x = x + feed(p["mlp"], norm(x))
    logits = linear(params["head"], norm(x)).astype(jnp.float32)
    return next_word(logits, batch["labels"])


@layer(
    "dtype changes",
    "preferred_element_type of products of bfloat16",
    "JAX documentation, jax.numpy.einsum and jax.lax.dot_general",
    up_and_down,
)
def preferred_type(p, x):
    x = jnp.asarray(norm(x), jnp.bfloat16)
    up = p["up"]["w"].astype(jnp.bfloat16)
    h = jnp.einsum("bsc,cf->bsf", x, up, preferred_element_type=jnp.float32) + p["up"]["b"]
    h = lax.convert_element_type(jax.nn.gelu(h), jnp.bfloat16)
    down = p["down"]["w"].astype(jnp.bfloat16)
    contracted = (((2,), (0,)), ((), ()))
    y = lax.dot_general(h, down, contracted, preferred_element_type=jnp.float32)
    return y + p["down"]["b"]


class Policy(NamedTuple):
    param_dtype: jnp.dtype
    compute_dtype: jnp.dtype
    output_dtype: jnp.dtype

    def cast(self, tree, dtype):
        def one(x):
            return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree.map(one, tree)

    def cast_to_compute(self, tree):
        return self.cast(tree, self.compute_dtype)

    def cast_to_output(self, tree):
        return self.cast(tree, self.output_dtype)


HALF = Policy(jnp.float32, jnp.bfloat16, jnp.float32)


@model(
    "dtype changes",
    "policy of parameter, compute and output types, block by block",
    "google-deepmind/jmp, jmp/_src/policy.py",
    init=stack(),
)
def by_policy(params, batch):
    def block(p, x):
        p, x = HALF.cast_to_compute((p, x))
        x = x + attend(p["attention"], norm(x))
        return HALF.cast_to_output(x + feed(p["mlp"], norm(x)))

    x = params["embed"][batch["tokens"]]
    for p in params["blocks"]:
        x = block(p, x)
    return next_word(linear(params["head"], norm(x)), batch["labels"])


@layer(
    "dtype changes",
    "weights rounded to eight bits, gradient straight through",
    "JAX documentation, Advanced automatic differentiation, straight-through estimator",
    up_and_down,
)
def rounded_weights(p, x):
    def straight_through(f, x):
        zero = x - lax.stop_gradient(x)
        return zero + lax.stop_gradient(f(x))

    def to_int8(w):
        scale = jnp.max(jnp.abs(w), axis=0, keepdims=True) / 127.0
        small = jnp.clip(jnp.round(w / scale), -127, 127).astype(jnp.int8)
        return small.astype(w.dtype) * scale

    h = norm(x) @ straight_through(to_int8, p["up"]["w"]) + p["up"]["b"]
    return jax.nn.relu(h) @ straight_through(to_int8, p["down"]["w"]) + p["down"]["b"]
