"""Models of Haiku: functions under `hk.transform`."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.jax_zoo_models.frame import SAMPLES, Parts, classes, kind, numbers

C, H = 32, 8


def mean_cross_entropy(logits, labels):
    one_hot = jax.nn.one_hot(labels, logits.shape[-1])
    return -jnp.sum(one_hot * jax.nn.log_softmax(logits)) / labels.size


def moved(key, params):
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    made = [a + 0.05 * jax.random.normal(k, a.shape) for k, a in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, made)


@kind("character transformer", "Haiku", "github.com/google-deepmind/dm-haiku, examples/transformer")
def transformer():
    length, vocabulary = 8, 64
    start = hk.initializers.VarianceScaling(2 / 2)

    def norm(x):
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)

    def forward(tokens):
        input_mask = jnp.greater(tokens, 0)
        s = tokens.shape[1]
        h = hk.Embed(vocab_size=vocabulary, embed_dim=C)(tokens)
        h = h + hk.get_parameter("positional", [s, C], init=hk.initializers.TruncatedNormal(0.02))
        mask = input_mask[:, None, None, :] * np.tril(np.ones((1, 1, s, s)))
        for _ in range(2):
            attend = hk.MultiHeadAttention(num_heads=H, key_size=C // H, model_size=C, w_init=start)
            y = norm(h)
            h = h + attend(y, y, y, mask=mask)
            dense = hk.Sequential(
                [hk.Linear(64, w_init=start), jax.nn.gelu, hk.Linear(C, w_init=start)]
            )
            h = h + dense(norm(h))
        return hk.Linear(vocabulary)(norm(h))

    model = hk.without_apply_rng(hk.transform(forward))

    def init(key):
        return moved(key, model.init(key, jnp.zeros((1, length), jnp.int32)))

    def loss(params, batch):
        logits = model.apply(params, batch["obs"])
        targets = jax.nn.one_hot(batch["target"], vocabulary)
        mask = jnp.greater(batch["obs"], 0)
        log_likelihood = jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)
        return -jnp.sum(log_likelihood * mask) / jnp.sum(mask)

    def batch(draws):
        return {
            "obs": classes(draws, vocabulary, length),
            "target": classes(draws, vocabulary, length),
        }

    return Parts(init, loss, batch)


@kind(
    "Haiku ResNet",
    "Haiku",
    "github.com/google-deepmind/dm-haiku, examples/imagenet; hk.nets",
    joined=True,
)
def resnet():
    """`hk.BatchNorm` with its averages held as state, which is the aux."""

    def forward(x):
        x = hk.Conv2D(8, 3, stride=2, with_bias=False)(x)
        x = hk.max_pool(x, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for width, stride in ((8, 1), (16, 2)):
            y = hk.Conv2D(width, 3, stride=stride, with_bias=False)(x)
            y = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(y, is_training=True))
            y = hk.Conv2D(width, 3, with_bias=False)(y)
            y = hk.BatchNorm(True, True, 0.9)(y, is_training=True)
            if x.shape != y.shape:
                x = hk.Conv2D(width, 1, stride=stride, with_bias=False)(x)
                x = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
            x = jax.nn.relu(x + y)
        return hk.Linear(10)(jnp.mean(x, axis=(1, 2)))

    model = hk.without_apply_rng(hk.transform_with_state(forward))
    image = jnp.zeros((1, 16, 16, 3))
    shapes = jax.eval_shape(model.init, jax.random.key(0), image)[1]
    averages = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)

    def init(key):
        return moved(key, model.init(key, image)[0])

    def loss(params, batch):
        logits, state = model.apply(params, averages, batch["image"])
        squares = [jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params)]
        return mean_cross_entropy(logits, batch["label"]) + 1e-4 * 0.5 * sum(squares), state

    def batch(draws):
        return {"image": numbers(draws, 16, 16, 3), "label": classes(draws, 10)}

    return Parts(init, loss, batch, has_aux=True)


@kind("Haiku LSTM", "Haiku", "github.com/google-deepmind/dm-haiku, examples/rnn/train.py")
def lstm():
    """`hk.dynamic_unroll` of a deep core over [time, batch], one_hot words."""
    length, vocabulary = 8, 64

    def unroll(tokens):
        core = hk.DeepRNN(
            [
                lambda x: jax.nn.one_hot(x, num_classes=vocabulary),
                hk.LSTM(C),
                jax.nn.relu,
                hk.LSTM(C),
                hk.nets.MLP([C, vocabulary]),
            ]
        )
        tokens = tokens.T
        logits, _ = hk.dynamic_unroll(core, tokens, core.initial_state(tokens.shape[1]))
        return logits

    model = hk.without_apply_rng(hk.transform(unroll))

    def init(key):
        return moved(key, model.init(key, jnp.zeros((1, length), jnp.int32)))

    def loss(params, batch):
        logits = model.apply(params, batch["tokens"])
        return mean_cross_entropy(logits, batch["labels"].T)

    def batch(draws):
        return {n: classes(draws, vocabulary, length) for n in ("tokens", "labels")}

    return Parts(init, loss, batch)


@kind("Haiku VAE", "Haiku", "github.com/google-deepmind/dm-haiku, examples/vae.py")
def vae():
    """`hk.next_rng_key` inside, the batch's key beside the parameters."""
    shape = (4, 6)

    def forward(x):
        h = jax.nn.relu(hk.Linear(C)(hk.Flatten()(x)))
        mean, log_stddev = hk.Linear(8)(h), hk.Linear(8)(h)
        stddev = jnp.exp(log_stddev)
        z = mean + stddev * jax.random.normal(hk.next_rng_key(), mean.shape)
        h = jax.nn.relu(hk.Linear(C)(z))
        logits = jnp.reshape(hk.Linear(24)(h), (-1, *shape))
        return mean, jnp.square(stddev), logits

    model = hk.transform(forward)

    def init(key):
        return moved(key, model.init(key, jnp.zeros((1, *shape))))

    def loss(params, batch):
        mean, variance, logits = model.apply(params, batch["key"], batch["image"])
        x = batch["image"]
        log_probs = x * logits - jnp.logaddexp(0.0, logits)
        log_likelihood = jnp.sum(log_probs.reshape(x.shape[0], -1), axis=1)
        kl = 0.5 * jnp.sum(-jnp.log(variance) - 1.0 + variance + jnp.square(mean), axis=-1)
        return -jnp.mean(log_likelihood - kl)

    def batch(draws):
        return {"image": (draws.uniform(size=(SAMPLES, *shape)) > 0.5).astype(np.float32)}

    return Parts(init, loss, batch, keyed=True)
