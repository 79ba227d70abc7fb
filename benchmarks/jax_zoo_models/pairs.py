"""Representations that are learnt by comparison or reconstruction, in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.jax_zoo_models.decoders import LAYERS, C, D, H, V, cross_entropy, layer_norm
from benchmarks.jax_zoo_models.frame import SAMPLES, Parts, classes, drawn, kind, numbers

P = 16
"""Patches of an image, each of 12 numbers."""
NORM = {"g": (C,), "b": (C,)}
BLOCK = {
    "norm1": NORM,
    "norm2": NORM,
    "qkv": (C, 3 * C),
    "out": (C, C),
    "up": (C, 64),
    "down": (64, C),
}


def attend(q, k, v, mask=None):
    """[b, s, c] each, H heads."""
    q, k, v = (y.reshape(*y.shape[:2], H, D) for y in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(*q.shape[:2], C)


def block(x, p, mask=None):
    q, k, v = jnp.split(layer_norm(x, **p["norm1"]) @ p["qkv"], 3, axis=-1)
    x = x + attend(q, k, v, mask) @ p["out"]
    return x + jax.nn.gelu(layer_norm(x, **p["norm2"]) @ p["up"]) @ p["down"]


def encoded(x, blocks, mask=None):
    for p in blocks:
        x = block(x, p, mask)
    return x


@kind(
    "CLIP",
    "plain JAX",
    "github.com/openai/CLIP, clip/model.py; loss: huggingface run_clip.py",
    joined=True,
)
def clip():
    """Two towers, the text's taken at its end, and every image against every text."""

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(params, batch):
        image = batch["patches"] @ params["patch"] + params["image_positions"]
        token = jnp.broadcast_to(params["class"], (image.shape[0], 1, C))
        image = encoded(jnp.concatenate([token, image], axis=1), params["image"])
        ids = batch["tokens"]
        causal = jnp.tril(jnp.ones((ids.shape[1], ids.shape[1]), bool))
        text = params["words"][ids] + params["text_positions"]
        text = encoded(text, params["text"], causal)
        ends = text[jnp.arange(ids.shape[0]), ids.argmax(axis=-1)]
        image = unit(layer_norm(image[:, 0], **params["image_norm"]) @ params["image_out"])
        text = unit(layer_norm(ends, **params["text_norm"]) @ params["text_out"])
        logits = jnp.exp(params["scale"]) * text @ image.T
        labels = jnp.arange(logits.shape[0])
        sides = (
            optax.softmax_cross_entropy_with_integer_labels(y, labels).mean()
            for y in (logits, logits.T)
        )
        return sum(sides) / 2

    shapes = {
        "patch": (12, C),
        "image_positions": (P, C),
        "class": (C,),
        "image": [BLOCK] * LAYERS,
        "image_norm": NORM,
        "image_out": (C, 16),
        "words": (V, C),
        "text_positions": (8, C),
        "text": [BLOCK] * LAYERS,
        "text_norm": NORM,
        "text_out": (C, 16),
        "scale": (),
    }

    def batch(draws):
        return {"patches": numbers(draws, P, 12), "tokens": classes(draws, V, 8)}

    return Parts(lambda key: drawn(key, shapes), loss, batch)


@kind("MAE", "plain JAX", "github.com/facebookresearch/mae, models_mae.py")
def mae():
    """Patches shuffled by noise and most of them left out, by argsort and take_along_axis."""
    kept = 4

    def loss(params, batch):
        patches = batch["patches"]
        b = patches.shape[0]
        x = patches @ params["patch"] + params["positions"]
        shuffle = jnp.argsort(batch["noise"], axis=1)
        restore = jnp.argsort(shuffle, axis=1)
        keep = shuffle[:, :kept]
        x = jnp.take_along_axis(x, jnp.repeat(keep[..., None], C, axis=-1), axis=1)
        mask = jnp.ones((b, P)).at[:, :kept].set(0)
        mask = jnp.take_along_axis(mask, restore, axis=1)
        x = layer_norm(encoded(x, params["encoder"]), **params["norm"]) @ params["bridge"]
        hidden = jnp.tile(params["mask_token"], (b, P - kept, 1))
        x = jnp.concatenate([x, hidden], axis=1)
        x = jnp.take_along_axis(x, restore[:, :, None], axis=1) + params["decoder_positions"]
        y = layer_norm(encoded(x, params["decoder"]), **params["decoder_norm"]) @ params["pixels"]
        mean = patches.mean(axis=-1, keepdims=True)
        target = (patches - mean) / (patches.var(axis=-1, keepdims=True) + 1.0e-6) ** 0.5
        return ((jnp.square(y - target).mean(axis=-1)) * mask).sum() / mask.sum()

    shapes = {
        "patch": (12, C),
        "positions": (P, C),
        "encoder": [BLOCK] * LAYERS,
        "norm": NORM,
        "bridge": (C, C),
        "mask_token": (1, 1, C),
        "decoder_positions": (P, C),
        "decoder": [BLOCK],
        "decoder_norm": NORM,
        "pixels": (C, 12),
    }

    def batch(draws):
        noise = draws.permuted(np.tile(np.arange(P), (SAMPLES, 1)), axis=1)
        return {"patches": numbers(draws, P, 12), "noise": noise.astype(np.float32)}

    return Parts(lambda key: drawn(key, shapes), loss, batch)


@kind("I-JEPA", "plain JAX", "github.com/facebookresearch/ijepa, src/train.py, src/helper.py")
def jepa():
    """What a target encoder, through which no gradient flows, makes of places that are hidden."""
    context, hidden = 8, 4

    def picked(x, places):
        return jnp.take_along_axis(x, places[..., None], axis=1)

    def smooth(x):
        size = jnp.abs(x)
        return jnp.where(size < 1, 0.5 * x * x, size - 0.5).mean()

    def loss(params, batch):
        x = batch["patches"] @ params["patch"] + params["positions"]
        target = jax.lax.stop_gradient(layer_norm(encoded(x, params["encoder"]), 1.0, 0.0))
        target = picked(target, batch["hidden"])
        seen = encoded(picked(x, batch["context"]), params["encoder"]) @ params["bridge"]
        places = jnp.broadcast_to(params["predictor_positions"], (x.shape[0], P, C))
        asked = params["token"] + picked(places, batch["hidden"])
        seen = seen + picked(places, batch["context"])
        y = encoded(jnp.concatenate([seen, asked], axis=1), params["predictor"])
        return smooth(layer_norm(y[:, context:], **params["norm"]) @ params["out"] - target)

    shapes = {
        "patch": (12, C),
        "positions": (P, C),
        "encoder": [BLOCK] * LAYERS,
        "bridge": (C, C),
        "token": (C,),
        "predictor_positions": (P, C),
        "predictor": [BLOCK],
        "norm": NORM,
        "out": (C, C),
    }

    def batch(draws):
        order = draws.permuted(np.tile(np.arange(P), (SAMPLES, 1)), axis=1).astype(np.int32)
        return {
            "patches": numbers(draws, P, 12),
            "context": order[:, :context],
            "hidden": order[:, context : context + hidden],
        }

    return Parts(lambda key: drawn(key, shapes), loss, batch)


@kind(
    "BYOL",
    "plain JAX",
    "github.com/google-deepmind/deepmind-research, byol/byol_experiment.py",
    joined=True,
)
def byol():
    """Two views, each predicted from the other; the target network is held by the batch's side."""

    def mlp(p, x):
        x = x @ p["w1"] + p["b1"]
        mean, var = x.mean(0), x.var(0)
        x = (x - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"] + p["offset"]
        return jax.nn.relu(x) @ p["w2"]

    def unit(x):
        square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.maximum(square, 1e-12))

    def loss(params, batch):
        def online(x):
            z = mlp(params["projector"], jax.nn.relu(x @ params["encoder"]))
            return mlp(params["predictor"], z)

        def target(x):
            still = jax.lax.stop_gradient(params)
            return mlp(still["projector"], jax.nn.relu(x @ still["encoder"]))

        one, other = batch["view1"], batch["view2"]
        error = jnp.sum(jnp.square(unit(online(one)) - unit(target(other))), axis=-1)
        error += jnp.sum(jnp.square(unit(online(other)) - unit(target(one))), axis=-1)
        return jnp.mean(error)

    net = {"w1": (C, 64), "b1": (64,), "scale": (64,), "offset": (64,), "w2": (64, C)}
    shapes = {"encoder": (24, C), "projector": net, "predictor": net}

    def batch(draws):
        return {"view1": numbers(draws, 24), "view2": numbers(draws, 24)}

    return Parts(lambda key: drawn(key, shapes), loss, batch)


@kind("Perceiver IO", "plain JAX", "github.com/google-deepmind/deepmind-research, perceiver")
def perceiver():
    """Latents that read the input by cross-attention, and queries that read the latents."""
    latents, queries = 8, 8

    def cross(x, memory, p):
        q = layer_norm(x, **p["norm_q"]) @ p["q"]
        k, v = jnp.split(layer_norm(memory, **p["norm_kv"]) @ p["kv"], 2, axis=-1)
        x = x + attend(q, k, v) @ p["out"]
        return x + jax.nn.gelu(layer_norm(x, **p["norm2"]) @ p["up"]) @ p["down"]

    def fourier(positions, bands):
        freqs = jnp.linspace(1.0, 8.0, bands)
        angle = positions[..., None] * freqs * jnp.pi
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle), positions[..., None]], -1)

    def loss(params, batch):
        x = batch["patches"]
        where = fourier(jnp.linspace(-1.0, 1.0, P), 6)
        x = jnp.concatenate([x, jnp.broadcast_to(where, (x.shape[0], *where.shape))], -1)
        x = x @ params["input"]
        z = jnp.broadcast_to(params["latents"][None], (x.shape[0], latents, C))
        z = cross(z, x, params["read"])
        z, _ = jax.lax.scan(lambda z, p: (block(z, p), None), z, params["process"])
        asked = jnp.broadcast_to(params["queries"][None], (x.shape[0], queries, C))
        return cross_entropy(cross(asked, z, params["write"]) @ params["head"], batch["labels"])

    reading = {
        "norm_q": NORM,
        "norm_kv": NORM,
        "norm2": NORM,
        "q": (C, C),
        "kv": (C, 2 * C),
        "out": (C, C),
        "up": (C, 64),
        "down": (64, C),
    }
    stacked = jax.tree.map(lambda s: (LAYERS, *s), BLOCK, is_leaf=lambda s: isinstance(s, tuple))
    shapes = {
        "input": (12 + 13, C),
        "latents": (latents, C),
        "queries": (queries, C),
        "read": reading,
        "process": stacked,
        "write": reading,
        "head": (C, V),
    }

    def batch(draws):
        return {"patches": numbers(draws, P, 12), "labels": classes(draws, V, queries)}

    return Parts(lambda key: drawn(key, shapes), loss, batch)


@kind(
    "wav2vec with CTC", "plain JAX", "github.com/huggingface/transformers, modeling_flax_wav2vec2"
)
def wav2vec():
    """Strided convolutions over samples of sound, a convolution of groups for places, a
    transformer, and `optax.ctc_loss` over labels of several lengths."""

    def conv(x, w, stride, padding="VALID", groups=1):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (stride,),
            padding,
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=groups,
        )

    def loss(params, batch):
        x = batch["sound"][..., None]
        for w, stride in zip(params["convs"], (4, 2), strict=True):
            x = jax.nn.gelu(layer_norm(conv(x, w, stride), 1.0, 0.0), approximate=False)
        x = layer_norm(x, **params["norm"]) @ params["projection"]
        places = conv(x, params["place_conv"], 1, [(1, 1)], groups=8) + params["place_bias"]
        x = encoded(x + jax.nn.gelu(places, approximate=False), params["encoder"])
        logits = x @ params["head"]
        none = jnp.zeros(logits.shape[:2])
        padding = batch["label_padding"].astype(logits.dtype)
        return optax.ctc_loss(logits, none, batch["labels"], padding).mean()

    shapes = {
        "convs": [(4, 1, C), (3, C, C)],
        "norm": NORM,
        "projection": (C, C),
        "place_conv": (3, C // 8, C),
        "place_bias": (C,),
        "encoder": [BLOCK] * LAYERS,
        "head": (C, 8),
    }

    def batch(draws):
        lengths = draws.integers(1, 4, SAMPLES)
        return {
            "sound": numbers(draws, 68),
            "labels": 1 + classes(draws, 7, 3),
            "label_padding": (np.arange(3) >= lengths[:, None]).astype(np.float32),
        }

    return Parts(lambda key: drawn(key, shapes), loss, batch)
