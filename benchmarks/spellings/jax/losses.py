"""Losses: of words, of words that count, of pairs in the batch, beside others, and of a teacher."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.spellings.jax.frame import (
    LAYERS,
    B,
    C,
    H,
    S,
    V,
    dense,
    linear,
    model,
    norm,
    numbers,
    padded,
    tokens,
)


def block_init(key):
    qkv, out, up, down = jax.random.split(key, 4)
    return {
        "qkv": dense(qkv, C, 3 * C),
        "out": dense(out, C, C),
        "up": dense(up, C, 2 * C),
        "down": dense(down, 2 * C, C),
    }


def block(p, x, causal=True):
    q, k, v = (
        y.reshape(*x.shape[:2], H, C // H) for y in jnp.split(linear(p["qkv"], norm(x)), 3, -1)
    )
    y = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    x = x + linear(p["out"], y.reshape(x.shape))
    return x + linear(p["down"], jax.nn.gelu(linear(p["up"], norm(x))))


def lm_init(key):
    keys = jax.random.split(key, 2 + LAYERS)
    return {
        "embed": jax.random.normal(keys[0], (V, C)),
        "blocks": [block_init(k) for k in keys[2:]],
        "head": dense(keys[1], C, V),
    }


def logits_of(params, ids, causal=True):
    x = params["embed"][ids]
    for p in params["blocks"]:
        x = block(p, x, causal)
    return linear(params["head"], norm(x))


# cross entropy


@model(
    "cross entropy",
    "sum of one_hot times log_softmax",
    "google/flax, examples/lm1b/train.py, compute_weighted_cross_entropy",
    init=lm_init,
)
def one_hot_product(params, batch):
    logits = logits_of(params, batch["tokens"])
    targets = jax.nn.one_hot(batch["labels"], V)
    return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1).mean()


@model(
    "cross entropy",
    "take_along_axis of log_softmax in float32",
    "young-geng/EasyLM, EasyLM/jax_utils.py, cross_entropy_loss_and_accuracy",
    init=lm_init,
)
def taken(params, batch):
    logits = logits_of(params, batch["tokens"]).astype(jnp.float32)
    log_prob = jnp.squeeze(
        jnp.take_along_axis(
            jax.nn.log_softmax(logits, axis=-1), jnp.expand_dims(batch["labels"], -1), axis=-1
        ),
        -1,
    )
    return -jnp.mean(log_prob)


@model(
    "cross entropy",
    "softmax_cross_entropy_with_integer_labels of optax",
    "cgarciae/nanoGPT-jax, model.py",
    init=lm_init,
    needs="optax",
)
def by_optax(params, batch):
    import optax

    logits = logits_of(params, batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


@model(
    "cross entropy",
    "logsumexp less logits indexed by arange and labels",
    "google-research/google-research, contrastive_rl/contrastive/learning.py, the indexing",
    init=lm_init,
)
def indexed(params, batch):
    logits = logits_of(params, batch["tokens"]).reshape(-1, V)
    labels = batch["labels"].reshape(-1)
    correct = logits[jnp.arange(logits.shape[0]), labels]
    return (jax.scipy.special.logsumexp(logits, axis=1) - correct).mean()


@model(
    "cross entropy",
    "vmap of a sample's loss, itself vmap of a word's",
    "awf/functional-transformer, transformer.py and main.py",
    init=lm_init,
)
def vmap_of_losses(params, batch):
    def crossentropy(output, target):
        return -jax.nn.log_softmax(output)[target]

    def sample_loss(params, ids, labels):
        output = logits_of(params, ids[None, :])[0]
        return jax.vmap(crossentropy)(output, labels).mean()

    losses = jax.vmap(sample_loss, in_axes=(None, 0, 0))(params, batch["tokens"], batch["labels"])
    return losses.mean()


# masked losses


def word_losses(logits, labels):
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


@model(
    "masked losses",
    "product with the mask, divided by its sum and a little",
    "AI-Hypercomputer/maxtext, MaxText/train.py",
    init=lm_init,
    batch=padded,
)
def mask_product(params, batch):
    xent = word_losses(logits_of(params, batch["tokens"]), batch["labels"])
    xent = xent * (batch["mask"] != 0)
    total_loss = jnp.sum(xent)
    total_weights = jnp.sum(batch["mask"] != 0)
    return total_loss / (total_weights + 1e-8)


def with_ignored(step=0):
    """Labels of -100 where nothing is to be predicted."""
    batch = padded(step)
    hidden = np.random.default_rng(step + 1).random((B, S)) < 0.5
    labels = np.where(hidden & (batch["mask"] == 1), batch["labels"], -100).astype(np.int32)
    return {"tokens": np.where(hidden, 0, batch["tokens"]).astype(np.int32), "labels": labels}


@model(
    "masked losses",
    "labels of minus 100, one_hot of which is zero",
    "huggingface/transformers, examples/flax/language-modeling/run_mlm_flax.py",
    init=lm_init,
    batch=with_ignored,
)
def ignored_labels(params, batch):
    logits = logits_of(params, batch["tokens"], causal=False)
    label_mask = jnp.where(batch["labels"] >= 0, 1.0, 0.0)
    one_hot = jax.nn.one_hot(batch["labels"], logits.shape[-1])
    loss = -jnp.sum(one_hot * jax.nn.log_softmax(logits, axis=-1), axis=-1) * label_mask
    return loss.sum() / jnp.maximum(label_mask.sum(), 1)


@model(
    "masked losses",
    "mean of each sample's words, then of the samples",
    "young-geng/EasyLM, EasyLM/jax_utils.py, cross_entropy_loss_and_accuracy",
    init=lm_init,
    batch=padded,
)
def sample_means(params, batch):
    losses = word_losses(logits_of(params, batch["tokens"]), batch["labels"])
    valid = batch["mask"].astype(jnp.float32)
    lengths = jnp.maximum(valid.sum(axis=-1), 1e-10)
    losses = jnp.where(valid > 0.0, losses, jnp.array(0.0))
    return jnp.mean(losses.sum(axis=-1) / lengths)


@model(
    "masked losses",
    "where argument of mean",
    "JAX documentation, jax.numpy.mean",
    init=lm_init,
    batch=padded,
)
def mean_where(params, batch):
    mask = batch["mask"].astype(bool)
    losses = word_losses(logits_of(params, batch["tokens"]), batch["labels"])
    return losses.mean(where=mask)


def with_positions(step=0):
    """Which words are asked for, ``positions`` [b, p], with a weight of 0 for those made up."""
    draws = np.random.default_rng(step)
    positions = np.stack([np.sort(draws.choice(S, 4, replace=False)) for _ in range(B)])
    weights = (np.arange(4) < draws.integers(1, 5, (B, 1))).astype(np.float32)
    batch = tokens(step)
    return {
        "input_ids": batch["tokens"],
        "positions": positions.astype(np.int32),
        "ids": np.take_along_axis(batch["labels"], positions, axis=1),
        "weights": weights,
    }


@model(
    "masked losses",
    "gather of the positions asked for, from flat rows",
    "google-research/bert, run_pretraining.py, gather_indexes, as written in jnp",
    init=lm_init,
    batch=with_positions,
)
def gathered_positions(params, batch):
    x = params["embed"][batch["input_ids"]]
    for p in params["blocks"]:
        x = block(p, x, causal=False)
    b, s, c = x.shape
    flat = (batch["positions"] + jnp.arange(b)[:, None] * s).reshape(-1)
    rows = jnp.take(x.reshape(b * s, c), flat, axis=0)
    log_probs = jax.nn.log_softmax(linear(params["head"], norm(rows)), axis=-1)
    one_hot = jax.nn.one_hot(batch["ids"].reshape(-1), V, dtype=jnp.float32)
    per_example = -jnp.sum(log_probs * one_hot, axis=-1)
    weights = batch["weights"].reshape(-1)
    return jnp.sum(weights * per_example) / (jnp.sum(weights) + 1e-5)


# contrast over the batch


def tower_init(key, **more):
    first, last, *keys = jax.random.split(key, 2 + LAYERS)
    return {
        "inward": dense(first, C, C),
        "blocks": [block_init(k) for k in keys],
        "outward": dense(last, C, C),
        **more,
    }


def encode(params, x):
    """One vector [b, c] of each sample."""
    x = linear(params["inward"], x)
    for p in params["blocks"]:
        x = block(p, x, causal=False)
    return linear(params["outward"], norm(x).mean(axis=1))


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


@model(
    "contrast over the batch",
    "diagonal of log_softmax over either axis",
    "huggingface/transformers, examples/research_projects/jax-projects/hybrid_clip",
    init=lambda key: tower_init(key, logit_scale=jnp.array(2.6592)),
    batch=numbers,
)
def clip(params, batch):
    image, text = unit(encode(params, batch["x"])), unit(encode(params, batch["y"]))
    similarity = jnp.matmul(text, image.T) * jnp.exp(params["logit_scale"])
    rows, columns = (jnp.diag(jax.nn.log_softmax(similarity, axis=axis)) for axis in (0, 1))
    return -(rows.mean() + columns.mean()) / 2


@model(
    "contrast over the batch",
    "log_sigmoid of all pairs, sign by eye",
    "google-research/big_vision, big_vision/trainers/proj/image_text/siglip.py",
    init=lambda key: tower_init(key, t=jnp.log(10.0), b=jnp.array(-10.0)),
    batch=numbers,
)
def siglip(params, batch):
    zimg, ztxt = unit(encode(params, batch["x"])), unit(encode(params, batch["y"]))
    logits = jnp.dot(zimg, ztxt.T) * jnp.exp(params["t"]) + params["b"]
    eye = jnp.eye(zimg.shape[0])
    signs = -jnp.ones_like(logits) + 2 * eye
    loglik = jax.nn.log_sigmoid(signs * logits)
    return jnp.mean(-jnp.sum(loglik, axis=-1))


@model(
    "contrast over the batch",
    "two views in one, own similarity set away, partner by roll",
    "phlippe/uvadlc_notebooks, docs/tutorial_notebooks/JAX/tutorial17/SimCLR.ipynb",
    init=tower_init,
    batch=numbers,
)
def simclr(params, batch):
    feats = encode(params, jnp.concatenate([batch["x"], batch["y"]], axis=0))
    feats = unit(feats)
    cos_sim = feats @ feats.T / 0.1
    diag_range = jnp.arange(feats.shape[0], dtype=jnp.int32)
    cos_sim = cos_sim.at[diag_range, diag_range].set(-9e15)
    shifted = jnp.roll(diag_range, feats.shape[0] // 2)
    nll = -cos_sim[diag_range, shifted] + jax.nn.logsumexp(cos_sim, axis=-1)
    return nll.mean()


@model(
    "contrast over the batch",
    "correlation of channels over the samples, off its diagonal",
    "ryanccarelli/ssljax, ssljax/losses/barlow_twins.py",
    init=tower_init,
    batch=numbers,
)
def barlow_twins(params, batch):
    z1, z2 = encode(params, batch["x"]), encode(params, batch["y"])
    z1 = (z1 - z1.mean(axis=0)) / (z1.std(axis=0) + 1e-5)
    z2 = (z2 - z2.mean(axis=0)) / (z2.std(axis=0) + 1e-5)
    c = z1.T @ z2 / z1.shape[0]
    n = c.shape[0]
    off_diagonal = c.flatten()[:-1].reshape(n - 1, n + 1)[:, 1:].flatten()
    on = jnp.sum(jnp.square(jnp.diagonal(c) - 1))
    return on + 5e-3 * jnp.sum(jnp.square(off_diagonal))


@model(
    "contrast over the batch",
    "hardest of the distances that nested vmap gives",
    "omoindrot/tensorflow-triplet-loss, model/triplet_loss.py, batch_hard, by vmap",
    init=tower_init,
    batch=numbers,
)
def batch_hard(params, batch):
    anchors, positives = encode(params, batch["x"]), encode(params, batch["y"])

    def distance(a, b):
        return jnp.sqrt(jnp.sum((a - b) ** 2) + 1e-12)

    pairwise = jax.vmap(jax.vmap(distance, in_axes=(None, 0)), in_axes=(0, None))
    distances = pairwise(anchors, positives)
    same = jnp.eye(distances.shape[0], dtype=bool)
    hardest = jnp.min(jnp.where(same, jnp.inf, distances), axis=1)
    return jnp.maximum(jnp.diag(distances) - hardest + 0.5, 0.0).mean()


# auxiliary losses

EXPERTS = 4


def experts_init(key):
    rest, *keys = jax.random.split(key, 1 + LAYERS)
    params = lm_init(rest)
    for p, k in zip(params["blocks"], keys, strict=True):
        router, w = jax.random.split(k)
        p["router"] = jax.random.normal(router, (C, EXPERTS)) / C**0.5
        p["experts"] = jax.random.normal(w, (EXPERTS, C, C)) / C**0.5
    return params


@model(
    "auxiliary losses",
    "balance of experts, summed in a list over the layers",
    "google/flaxformer, flaxformer/architectures/moe/routing.py, _load_balancing_loss",
    init=experts_init,
)
def balance(params, batch):
    x = params["embed"][batch["tokens"]]
    extra = []
    for p in params["blocks"]:
        x = block(p, x)
        h = norm(x)
        probs = jax.nn.softmax(h @ p["router"], axis=-1)
        mask = jax.nn.one_hot(jnp.argmax(probs, axis=-1), EXPERTS, dtype=jnp.float32)
        x = x + jnp.einsum(
            "bsec,bse->bsc", jnp.einsum("bsc,ecd->bsed", h, p["experts"]), mask * probs
        )
        tokens_per_expert = jnp.mean(mask, axis=-2)
        router_prob_per_expert = jnp.mean(probs, axis=-2)
        extra.append(jnp.mean(tokens_per_expert * router_prob_per_expert) * EXPERTS**2)
    losses = word_losses(linear(params["head"], norm(x)), batch["labels"])
    return losses.mean() + 0.01 * sum(extra)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy_with_z(logits, targets, z_loss):
    return cross_entropy_fwd(logits, targets, z_loss)[0]


def cross_entropy_fwd(logits, targets, z_loss):
    log_z = jax.nn.logsumexp(logits, axis=-1)
    logp = logits - log_z[..., None]
    loss = -jnp.sum(targets * logp, axis=-1) + z_loss * jnp.square(log_z)
    return loss, (targets, jnp.exp(logp), log_z)


def cross_entropy_bwd(z_loss, res, g):
    targets, probs, log_z = res
    slope = (1 + 2 * z_loss * log_z)[..., None] * probs - targets
    return g[..., None] * slope, jnp.zeros_like(targets)


cross_entropy_with_z.defvjp(cross_entropy_fwd, cross_entropy_bwd)


@model(
    "auxiliary losses",
    "square of log z in a custom_vjp",
    "google-research/t5x, t5x/losses.py, cross_entropy_with_logits",
    init=lm_init,
)
def z_loss(params, batch):
    logits = logits_of(params, batch["tokens"])
    targets = jax.nn.one_hot(batch["labels"], V, dtype=logits.dtype)
    total = cross_entropy_with_z(logits, targets, 1e-4)
    return jnp.sum(total) / total.size


def stacked_init(key):
    params = lm_init(key)
    return {**params, "blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *params["blocks"])}


@model(
    "auxiliary losses",
    "one head on every layer's output, stacked by scan",
    "google-research/scenic, scenic/projects/baselines/detr/detr_base_model.py, aux_outputs",
    init=stacked_init,
)
def every_layer(params, batch):
    def body(x, p):
        x = block(p, x)
        return x, x

    _, hidden = lax.scan(body, params["embed"][batch["tokens"]], params["blocks"])
    outputs = linear(params["head"], norm(hidden))
    losses = jax.vmap(lambda logits: word_losses(logits, batch["labels"]).mean())(outputs)
    main, aux = losses[-1], losses[:-1]
    return main + 0.5 * jnp.mean(aux)


@model(
    "auxiliary losses",
    "half the squares of all leaves with two dims",
    "google/flax, examples/imagenet/train.py, weight_penalty",
    init=lm_init,
)
def weight_penalty(params, batch):
    loss = word_losses(logits_of(params, batch["tokens"]), batch["labels"]).mean()
    squares = sum(jnp.sum(w**2) for w in jax.tree_util.tree_leaves(params) if w.ndim > 1)
    return loss + 1e-4 * 0.5 * squares


def codes_init(key):
    rest, codes = jax.random.split(key)
    return {**tower_init(rest), "codes": jax.random.normal(codes, (C, 16))}


@model(
    "auxiliary losses",
    "codebook and commitment, each with the other stopped",
    "google-deepmind/dm-haiku, haiku/_src/nets/vqvae.py",
    init=codes_init,
    batch=numbers,
)
def vector_quantizer(params, batch):
    x = linear(params["inward"], batch["x"])
    for p in params["blocks"][: LAYERS // 2]:
        x = block(p, x, causal=False)
    flat = jnp.reshape(x, (-1, C))
    distances = (
        jnp.sum(jnp.square(flat), 1, keepdims=True)
        - 2 * jnp.matmul(flat, params["codes"])
        + jnp.sum(jnp.square(params["codes"]), 0, keepdims=True)
    )
    indices = jnp.reshape(jnp.argmax(-distances, 1), x.shape[:-1])
    quantized = params["codes"].swapaxes(1, 0)[indices]
    commitment = jnp.mean(jnp.square(lax.stop_gradient(quantized) - x))
    codebook = jnp.mean(jnp.square(quantized - lax.stop_gradient(x)))
    x = x + lax.stop_gradient(quantized - x)
    for p in params["blocks"][LAYERS // 2 :]:
        x = block(p, x, causal=False)
    reconstruction = jnp.mean((linear(params["outward"], norm(x)) - batch["y"]) ** 2)
    return reconstruction + codebook + 0.25 * commitment


# distillation


def fixed(seed, *shape):
    return np.random.default_rng(seed).normal(0, shape[-2] ** -0.5, shape).astype(np.float32)


TEACHER = {"embed": fixed(1, V, C), "w": fixed(2, LAYERS, C, C), "head": fixed(3, C, V)}
"""A net without gradient, held in the module."""


def teacher_hidden(ids):
    x, hidden = jnp.asarray(TEACHER["embed"])[ids] * V**0.5, []
    for w in TEACHER["w"]:
        x = x + jax.nn.relu(norm(x) @ w)
        hidden.append(x)
    return hidden


@model(
    "distillation",
    "softened logits of a teacher closed over",
    "google-research/big_vision, big_vision/trainers/proj/distill/distill.py",
    init=lm_init,
)
def closed_over(params, batch, temperature=2.0):
    student = logits_of(params, batch["tokens"])
    teacher = lax.stop_gradient(norm(teacher_hidden(batch["tokens"])[-1]) @ TEACHER["head"])
    log_p = jax.nn.log_softmax(teacher / temperature)
    log_q = jax.nn.log_softmax(student / temperature)
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    return jnp.mean(kl) * temperature**2 + 0.5 * word_losses(student, batch["labels"]).mean()


def with_teacher_logits(step=0):
    draws = np.random.default_rng(step + 1)
    return {**tokens(step), "teacher_logits": draws.normal(size=(B, S, V)).astype(np.float32)}


@model(
    "distillation",
    "teacher's logits in the batch, kl_divergence of optax",
    "google/tunix, tunix/distillation/strategies/logit.py",
    init=lm_init,
    batch=with_teacher_logits,
    needs="optax",
)
def logits_in_batch(params, batch):
    import optax

    temperature, alpha = 2.0, 0.5
    student = logits_of(params, batch["tokens"])
    targets = jax.nn.softmax(batch["teacher_logits"] / temperature, axis=-1)
    kl = optax.kl_divergence(jax.nn.log_softmax(student / temperature, axis=-1), targets)
    one_hot = jax.nn.one_hot(batch["labels"], student.shape[-1])
    task = jnp.mean(optax.softmax_cross_entropy(student, one_hot))
    return alpha * jnp.mean(kl) * temperature**2 + (1 - alpha) * task


def with_hints(key):
    rest, *keys = jax.random.split(key, 1 + LAYERS)
    return {**lm_init(rest), "hints": [dense(k, C, C) for k in keys]}


@model(
    "distillation",
    "mean squares between paired hidden states",
    "huggingface/distil-whisper, training/flax/run_distillation.py, mse of hidden states",
    init=with_hints,
)
def paired_states(params, batch):
    x = params["embed"][batch["tokens"]]
    student = []
    for p in params["blocks"]:
        x = block(p, x)
        student.append(x)
    pairs = zip(params["hints"], student, teacher_hidden(batch["tokens"]), strict=True)
    mse = jnp.stack([jnp.mean(jnp.square(linear(w, s) - t)) for w, s, t in pairs])
    ce = word_losses(linear(params["head"], norm(x)), batch["labels"]).mean()
    return 0.8 * ce + mse.sum() / len(student)


def with_exits(key):
    rest, *keys = jax.random.split(key, LAYERS)
    return {**lm_init(rest), "exits": [dense(k, C, V) for k in keys]}


@model(
    "distillation",
    "early heads taught by the last, stopped",
    "Zhang et al. 2019, Be Your Own Teacher",
    init=with_exits,
)
def own_teacher(params, batch):
    x = params["embed"][batch["tokens"]]
    early = []
    for i, p in enumerate(params["blocks"]):
        x = block(p, x)
        if i < len(params["exits"]):
            early.append(linear(params["exits"][i], norm(x)))
    final = linear(params["head"], norm(x))
    soft = jax.nn.softmax(lax.stop_gradient(final), axis=-1)
    loss = word_losses(final, batch["labels"]).mean()
    for logits in early:
        taught = -(soft * jax.nn.log_softmax(logits)).sum(-1).mean()
        loss += 0.3 * taught + 0.7 * word_losses(logits, batch["labels"]).mean()
    return loss / (1 + len(early))


def with_predictor(key):
    rest, first, second = jax.random.split(key, 3)
    return {
        "online": tower_init(rest),
        "predictor": [dense(first, C, 2 * C), dense(second, 2 * C, C)],
    }


@model(
    "distillation",
    "two views, the other view's projection stopped",
    "google-deepmind/deepmind-research, byol/utils/helpers.py, regression_loss",
    init=with_predictor,
    batch=numbers,
)
def other_view(params, batch):
    def predict(z):
        first, second = params["predictor"]
        return linear(second, jax.nn.relu(linear(first, z)))

    def normalized(z):
        return z * lax.rsqrt(jnp.sum(z**2, axis=-1, keepdims=True) + 1e-12)

    def regression_loss(x, y):
        return jnp.sum((normalized(x) - normalized(y)) ** 2, axis=-1)

    z1, z2 = encode(params["online"], batch["x"]), encode(params["online"], batch["y"])
    loss = regression_loss(predict(z1), lax.stop_gradient(z2))
    loss += regression_loss(predict(z2), lax.stop_gradient(z1))
    return jnp.mean(loss)
