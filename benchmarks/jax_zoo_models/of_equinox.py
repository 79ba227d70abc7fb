"""Models of Equinox: modules that are trees, each sample by `jax.vmap`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from benchmarks.jax_zoo_models.frame import SAMPLES, Parts, classes, kind, numbers

C, H = 32, 8


def mean_cross_entropy(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -picked.mean()


def parts(make, loss, batch, **more):
    """``make(key)`` gives the module; what of it are arrays is trained."""
    _, static = eqx.partition(make(jr.key(0)), eqx.is_inexact_array)

    def init(key):
        params, _ = eqx.partition(make(key), eqx.is_inexact_array)
        leaves, tree = jax.tree.flatten(params)
        keys = jr.split(key, len(leaves))
        made = [a + 0.05 * jr.normal(k, a.shape) for k, a in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(tree, made)

    return Parts(init, lambda p, b: loss(eqx.combine(p, static), b), batch, **more)


@kind(
    "ConvNeXt", "Equinox", "github.com/facebookresearch/ConvNeXt, models/convnext.py (in Equinox)"
)
def convnext():
    """Convolutions of each channel, a norm over channels, products by 1 x 1, a scale a channel."""

    class Block(eqx.Module):
        depth: eqx.nn.Conv2d
        norm: eqx.nn.LayerNorm
        up: eqx.nn.Linear
        down: eqx.nn.Linear
        gamma: jax.Array

        def __init__(self, dim, key):
            k1, k2, k3 = jr.split(key, 3)
            self.depth = eqx.nn.Conv2d(dim, dim, 7, padding=3, groups=dim, key=k1)
            self.norm = eqx.nn.LayerNorm(dim, eps=1e-6)
            self.up = eqx.nn.Linear(dim, 4 * dim, key=k2)
            self.down = eqx.nn.Linear(4 * dim, dim, key=k3)
            self.gamma = 0.1 * jnp.ones(dim)

        def __call__(self, x):
            y = jnp.transpose(self.depth(x), (1, 2, 0))
            y = jax.vmap(jax.vmap(self.norm))(y)
            y = jax.vmap(jax.vmap(lambda v: self.down(jax.nn.gelu(self.up(v)))))(y)
            return x + jnp.transpose(self.gamma * y, (2, 0, 1))

    class ConvNeXt(eqx.Module):
        stem: eqx.nn.Conv2d
        stages: list
        between: list
        norm: eqx.nn.LayerNorm
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = iter(jr.split(key, 8))
            self.stem = eqx.nn.Conv2d(3, 16, 4, stride=4, key=next(keys))
            self.stages = [[Block(16, next(keys))], [Block(32, next(keys))]]
            self.between = [eqx.nn.Conv2d(16, 32, 2, stride=2, key=next(keys))]
            self.norm = eqx.nn.LayerNorm(32)
            self.head = eqx.nn.Linear(32, 10, key=next(keys))

        def __call__(self, x):
            x = self.stem(x)
            for i, stage in enumerate(self.stages):
                x = self.between[i - 1](x) if i else x
                for block in stage:
                    x = block(x)
            return self.head(self.norm(x.mean((1, 2))))

    def loss(model, batch):
        return mean_cross_entropy(jax.vmap(model)(batch["image"]), batch["label"])

    def batch(draws):
        return {"image": numbers(draws, 3, 16, 16), "label": classes(draws, 10)}

    return parts(ConvNeXt, loss, batch)


@kind("GRU", "Equinox", "docs.kidger.site/equinox/examples/train_rnn")
def gru():
    """`eqx.nn.GRUCell` in a scan over a spiral; binary cross-entropy of its last state."""

    class RNN(eqx.Module):
        cell: eqx.nn.GRUCell
        linear: eqx.nn.Linear
        bias: jax.Array

        def __init__(self, key):
            ckey, lkey = jr.split(key)
            self.cell = eqx.nn.GRUCell(2, C, key=ckey)
            self.linear = eqx.nn.Linear(C, 1, use_bias=False, key=lkey)
            self.bias = jnp.zeros(1)

        def __call__(self, inputs):
            hidden = jnp.zeros((self.cell.hidden_size,))

            def f(carry, inp):
                return self.cell(inp, carry), None

            out, _ = jax.lax.scan(f, hidden, inputs)
            return jax.nn.sigmoid(self.linear(out) + self.bias)

    def loss(model, batch):
        pred_y = jax.vmap(model)(batch["x"])[:, 0]
        y = batch["y"]
        return -jnp.mean(y * jnp.log(pred_y) + (1 - y) * jnp.log(1 - pred_y))

    def batch(draws):
        y = (draws.uniform(size=SAMPLES) > 0.5).astype(np.float32)
        return {"x": numbers(draws, 8, 2), "y": y}

    return parts(RNN, loss, batch)


@kind("score-based diffusion", "Equinox", "docs.kidger.site/equinox/examples/score_based_diffusion")
def score():
    """A mixer of patches that is given a time; noise and times from the batch's key."""
    image, patch, hidden = 8, 2, 16

    class MixerBlock(eqx.Module):
        patch_mixer: eqx.nn.MLP
        hidden_mixer: eqx.nn.MLP
        norm1: eqx.nn.LayerNorm
        norm2: eqx.nn.LayerNorm

        def __init__(self, patches, key):
            tkey, ckey = jr.split(key)
            self.patch_mixer = eqx.nn.MLP(patches, patches, 32, depth=1, key=tkey)
            self.hidden_mixer = eqx.nn.MLP(hidden, hidden, 32, depth=1, key=ckey)
            self.norm1 = eqx.nn.LayerNorm((hidden, patches))
            self.norm2 = eqx.nn.LayerNorm((patches, hidden))

        def __call__(self, y):
            y = y + jax.vmap(self.patch_mixer)(self.norm1(y))
            y = y.T
            y = y + jax.vmap(self.hidden_mixer)(self.norm2(y))
            return y.T

    class Mixer2d(eqx.Module):
        conv_in: eqx.nn.Conv2d
        conv_out: eqx.nn.ConvTranspose2d
        blocks: list
        norm: eqx.nn.LayerNorm
        t1: float

        def __init__(self, key):
            inkey, outkey, *bkeys = jr.split(key, 4)
            side = image // patch
            self.conv_in = eqx.nn.Conv2d(2, hidden, patch, stride=patch, key=inkey)
            self.conv_out = eqx.nn.ConvTranspose2d(hidden, 1, patch, stride=patch, key=outkey)
            self.blocks = [MixerBlock(side * side, key=k) for k in bkeys]
            self.norm = eqx.nn.LayerNorm((hidden, side * side))
            self.t1 = 10.0

        def __call__(self, t, y):
            t = jnp.broadcast_to(t / self.t1, (1, image, image))
            y = self.conv_in(jnp.concatenate([y, t]))
            _, h, w = y.shape
            y = y.reshape(hidden, h * w)
            for block in self.blocks:
                y = block(y)
            return self.conv_out(self.norm(y).reshape(hidden, h, w))

    def single_loss(model, data, t, key):
        mean = data * jnp.exp(-0.5 * t)
        std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-t), 1e-5))
        noise = jr.normal(key, data.shape)
        pred = model(t, mean + std * noise)
        return (1 - jnp.exp(-t)) * jnp.mean((pred + noise / std) ** 2)

    def loss(model, batch):
        data = batch["image"]
        b = data.shape[0]
        tkey, losskey = jr.split(batch["key"])
        losskey = jr.split(losskey, b)
        t = jr.uniform(tkey, (b,), minval=0, maxval=10.0 / b)
        t = t + (10.0 / b) * jnp.arange(b)
        each = jax.vmap(lambda d, s, k: single_loss(model, d, s, k))
        return jnp.mean(each(data, t, losskey))

    def batch(draws):
        return {"image": numbers(draws, 1, image, image)}

    return parts(Mixer2d, loss, batch, keyed=True)


@kind("BERT of Equinox", "Equinox", "docs.kidger.site/equinox/examples/bert")
def bert():
    """`eqx.nn.MultiheadAttention`, embeddings by vmap, a mask made of a padding mask, a pooler."""
    length, vocabulary = 8, 64

    class Embedder(eqx.Module):
        token: eqx.nn.Embedding
        position: eqx.nn.Embedding
        norm: eqx.nn.LayerNorm

        def __init__(self, key):
            tkey, pkey = jr.split(key)
            self.token = eqx.nn.Embedding(vocabulary, C, key=tkey)
            self.position = eqx.nn.Embedding(length, C, key=pkey)
            self.norm = eqx.nn.LayerNorm(C)

        def __call__(self, ids, positions):
            tokens = jax.vmap(self.token)(ids)
            return jax.vmap(self.norm)(tokens + jax.vmap(self.position)(positions))

    class Layer(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norm1: eqx.nn.LayerNorm
        up: eqx.nn.Linear
        down: eqx.nn.Linear
        norm2: eqx.nn.LayerNorm

        def __init__(self, key):
            akey, ukey, dkey = jr.split(key, 3)
            self.attention = eqx.nn.MultiheadAttention(
                num_heads=H,
                query_size=C,
                use_query_bias=True,
                use_key_bias=True,
                use_value_bias=True,
                use_output_bias=True,
                key=akey,
            )
            self.norm1, self.norm2 = eqx.nn.LayerNorm(C), eqx.nn.LayerNorm(C)
            self.up = eqx.nn.Linear(C, 64, key=ukey)
            self.down = eqx.nn.Linear(64, C, key=dkey)

        def __call__(self, x, mask):
            allowed = jnp.multiply(jnp.expand_dims(mask, -1), jnp.expand_dims(mask, -2))
            allowed = jnp.repeat(allowed[None], H, axis=0).astype(bool)
            y = self.attention(query=x, key_=x, value=x, mask=allowed)
            x = jax.vmap(self.norm1)(x + y)
            y = jax.vmap(lambda v: self.down(jax.nn.gelu(self.up(v))))(x)
            return jax.vmap(self.norm2)(x + y)

    class Classifier(eqx.Module):
        embedder: Embedder
        layers: list
        pooler: eqx.nn.Linear
        head: eqx.nn.Linear

        def __init__(self, key):
            ekey, pkey, hkey, *keys = jr.split(key, 5)
            self.embedder = Embedder(ekey)
            self.layers = [Layer(k) for k in keys]
            self.pooler = eqx.nn.Linear(C, C, key=pkey)
            self.head = eqx.nn.Linear(C, 2, key=hkey)

        def __call__(self, ids, positions):
            mask = jnp.asarray(ids != 0, dtype=jnp.int32)
            x = self.embedder(ids, positions)
            for layer in self.layers:
                x = layer(x, mask)
            return self.head(jnp.tanh(self.pooler(x[0])))

    def loss(model, batch):
        positions = jnp.arange(length)
        logits = jax.vmap(model, in_axes=(0, None))(batch["tokens"], positions)
        return mean_cross_entropy(logits, batch["label"])

    def batch(draws):
        lengths = draws.integers(3, length + 1, SAMPLES)
        ids = 1 + classes(draws, vocabulary - 1, length)
        ids = np.where(np.arange(length) < lengths[:, None], ids, 0).astype(np.int32)
        return {"tokens": ids, "label": classes(draws, 2)}

    return parts(Classifier, loss, batch)


@kind(
    "neural ODE of Equinox", "Equinox", "docs.kidger.site/diffrax/examples/neural_ode (fixed steps)"
)
def ode():
    """A vector field of `eqx.nn.MLP`; Heun's steps over given times in Tsitouras' place."""
    times = 6

    class Field(eqx.Module):
        mlp: eqx.nn.MLP
        scale: jax.Array

        def __init__(self, key):
            self.mlp = eqx.nn.MLP(4, 4, C, depth=2, activation=jax.nn.softplus,
                                  final_activation=jnp.tanh, key=key)  # fmt: skip
            self.scale = jnp.ones(())

        def __call__(self, t, y):
            return self.scale * self.mlp(y)

    def solved(field, ts, y0):
        def step(y, t):
            start, end = t
            dt = end - start
            first = field(start, y)
            second = field(end, y + dt * first)
            y = y + 0.5 * dt * (first + second)
            return y, y

        _, ys = jax.lax.scan(step, y0, (ts[:-1], ts[1:]))
        return jnp.concatenate([y0[None], ys])

    def loss(model, batch):
        ts = jnp.linspace(0.0, 1.0, times)
        y = jax.vmap(solved, in_axes=(None, None, 0))(model, ts, batch["y"][:, 0])
        return jnp.mean((batch["y"] - y) ** 2)

    return parts(Field, loss, lambda draws: {"y": numbers(draws, times, 4)})
