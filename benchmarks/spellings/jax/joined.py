"""Parts of a batch that a loss joins and runs at once, and losses weighed by parameters."""

import jax
import jax.numpy as jnp

from benchmarks.spellings.jax.frame import B, C, linear, model, norm, numbers
from benchmarks.spellings.jax.losses import lm_init, logits_of


def encoder_init(key):
    keys = jax.random.split(key, 3)
    return {
        "layers": [jax.random.normal(k, (C, C)) / C**0.5 for k in keys],
        "out": {"w": jax.random.normal(key, (C, C)) / C**0.5, "b": jnp.zeros(C)},
    }


def encode(params, x):
    for w in params["layers"]:
        x = x + jax.nn.gelu(norm(x) @ w)
    return linear(params["out"], x.mean(1))


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


@model(
    "parts of a batch run together",
    "chosen and rejected concatenated and split",
    "Rafailov et al. 2023, eric-mitchell/direct-preference-optimization, trainers.py",
    lm_init,
)
def preferred(params, batch):
    ids = jnp.concatenate([batch["tokens"], batch["labels"]], axis=0)
    logp = jax.nn.log_softmax(logits_of(params, ids)[:, :-1])
    logps = jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1)[..., 0].sum(-1)
    chosen, rejected = jnp.split(logps, 2, axis=0)
    return -jnp.mean(jax.nn.log_sigmoid(0.1 * (chosen - rejected)))


@model(
    "parts of a batch run together",
    "two views, positives by rolling half way",
    "Chen et al. 2020, SimCLR, equation 1",
    encoder_init,
    batch=numbers,
)
def views(params, batch):
    z = unit(encode(params, jnp.concatenate([batch["x"], batch["y"]])))
    logits = jnp.where(jnp.eye(2 * B, dtype=bool), -1e9, z @ z.T / 0.1)
    positive = jnp.sum(z * jnp.roll(z, B, axis=0), axis=-1) / 0.1
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - positive)


@model(
    "parts of a batch run together",
    "guided and not by slices",
    "Ho and Salimans 2022, equation 6",
    encoder_init,
    batch=numbers,
)
def guided(params, batch):
    n = batch["x"].shape[0]
    out = encode(params, jnp.concatenate([batch["x"], jnp.zeros_like(batch["x"])]))
    pred = out[n:] + 3.0 * (out[:n] - out[n:])
    return jnp.mean((pred - batch["y"].mean(1)) ** 2)


@model(
    "parts of a batch run together",
    "stacked and reshaped there and back",
    "Grill et al. 2020, BYOL, equation 2",
    encoder_init,
    batch=numbers,
)
def stacked(params, batch):
    both = jnp.stack([batch["x"], batch["y"]])
    z = encode(params, both.reshape(-1, *both.shape[2:])).reshape(2, -1, C)
    online, target = z[0], jax.lax.stop_gradient(z[1])
    return jnp.mean(2 - 2 * jnp.sum(unit(online) * unit(target), axis=-1))


@model(
    "parts of a batch run together",
    "vmap over a leading dim of two",
    "JAX documentation, jax.vmap",
    encoder_init,
    batch=numbers,
)
def mapped(params, batch):
    z = jax.vmap(lambda x: encode(params, x))(jnp.stack([batch["x"], batch["y"]]))
    return jnp.mean(jax.nn.relu(1 + jnp.sum(z[0] * z[1], -1))) + jnp.mean(z**2)


def weighed_init(key):
    return {**encoder_init(key), "log_vars": jnp.zeros(2), "scale": jnp.asarray(0.7)}


def parts(params, batch):
    pred, wanted = encode(params, batch["x"]), batch["y"].mean(1)
    return jnp.mean((pred - wanted) ** 2), jnp.mean(jnp.abs(pred))


@model(
    "losses weighed by parameters",
    "log variances of two tasks",
    "Kendall, Gal, Cipolla 2018, equation 10",
    weighed_init,
    batch=numbers,
)
def kendall(params, batch):
    losses = jnp.stack(parts(params, batch))
    return jnp.sum(jnp.exp(-params["log_vars"]) * losses + params["log_vars"])


@model(
    "losses weighed by parameters",
    "softplus weights one by one",
    "Groenendijk et al. 2021, rickgroen/cov-weighting, with weights that are learned",
    weighed_init,
    batch=numbers,
)
def softplus(params, batch):
    first, second = parts(params, batch)
    w = jax.nn.softplus(params["log_vars"])
    return w[0] * first + w[1] * second - 0.1 * jnp.log(w[0] * w[1])


@model(
    "losses weighed by parameters",
    "a softmax of weights by dot",
    "median-research-group/LibMTL, LibMTL/weighting/RLW.py, as jnp",
    weighed_init,
    batch=numbers,
)
def softmaxed(params, batch):
    return jnp.dot(jax.nn.softmax(params["log_vars"]), jnp.array(parts(params, batch)))


@model(
    "losses weighed by parameters",
    "a clipped scale of all logits",
    "google-research/big_vision, trainers/proj/image_text/siglip.py",
    weighed_init,
    batch=numbers,
)
def scaled(params, batch):
    a, b = unit(encode(params, batch["x"])), unit(encode(params, batch["y"]))
    logits = jnp.clip(jnp.exp(params["scale"]), max=100.0) * jnp.sum(a * b, -1) - 1.0
    return -jnp.mean(jax.nn.log_sigmoid(logits))


@model(
    "losses weighed by parameters",
    "a Lagrange multiplier with its gradient reversed",
    "google-deepmind/acme, agents/jax/mpo/learning.py",
    weighed_init,
    batch=numbers,
)
def lagrange(params, batch):
    loss, constraint = parts(params, batch)
    multiplier = jax.nn.softplus(params["scale"])
    dual = multiplier * jax.lax.stop_gradient(0.5 - constraint)
    return loss + jax.lax.stop_gradient(multiplier) * constraint + dual
