"""Models of Flax Linen: modules of functions, ``init`` and ``apply``."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.jax_zoo_models.frame import SAMPLES, Parts, classes, kind, numbers

C, H = 32, 8


def mean_cross_entropy(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -picked.mean()


def moved(key, params):
    """``params`` a little off, so that nothing is exactly zero or one."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    made = [a + 0.05 * jax.random.normal(k, a.shape) for k, a in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, made)


@kind("ResNet", "Linen", "github.com/google/flax, examples/imagenet/models.py", joined=True)
def resnet():
    """Bottlenecks, and norms by the statistics of the whole batch; what they ran to is the aux."""

    class Bottleneck(nn.Module):
        filters: int
        norm: nn.Module
        strides: tuple[int, int] = (1, 1)

        @nn.compact
        def __call__(self, x):
            conv = partial(nn.Conv, use_bias=False)
            residual = x
            y = nn.relu(self.norm()(conv(self.filters, (1, 1))(x)))
            y = nn.relu(self.norm()(conv(self.filters, (3, 3), self.strides)(y)))
            y = conv(self.filters * 2, (1, 1))(y)
            y = self.norm(scale_init=nn.initializers.zeros_init())(y)
            if residual.shape != y.shape:
                residual = conv(self.filters * 2, (1, 1), self.strides, name="conv_proj")(residual)
                residual = self.norm(name="norm_proj")(residual)
            return nn.relu(residual + y)

    class ResNet(nn.Module):
        stages: Sequence[int]

        @nn.compact
        def __call__(self, x, train=True):
            norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5)
            x = nn.Conv(8, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], use_bias=False)(x)
            x = nn.relu(norm(name="bn_init")(x))
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for i, count in enumerate(self.stages):
                for j in range(count):
                    strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                    x = Bottleneck(8 * 2**i, norm, strides)(x)
            return nn.Dense(10)(jnp.mean(x, axis=(1, 2)))

    model = ResNet((1, 1))
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
    statistics = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), variables["batch_stats"])

    def init(key):
        return moved(key, model.init(key, jnp.zeros((1, 16, 16, 3)))["params"])

    def loss(params, batch):
        logits, state = model.apply(
            {"params": params, "batch_stats": statistics}, batch["image"], mutable=["batch_stats"]
        )
        return mean_cross_entropy(logits, batch["label"]), state["batch_stats"]

    def batch(draws):
        return {"image": numbers(draws, 16, 16, 3), "label": classes(draws, 10)}

    return Parts(init, loss, batch, has_aux=True)


@kind("U-Net", "Linen", "github.com/yiyixuxu/denoising-diffusion-flax, unet.py")
def u_net():
    """Blocks of GroupNorm with the step of the diffusion added, attention in the middle, skips."""

    class ResBlock(nn.Module):
        dim: int

        @nn.compact
        def __call__(self, x, t):
            y = nn.Conv(self.dim, (3, 3), padding="SAME")(nn.swish(nn.GroupNorm(4)(x)))
            shift, scale = jnp.split(nn.Dense(2 * self.dim)(nn.swish(t))[:, None, None], 2, -1)
            y = nn.GroupNorm(4)(y) * (1 + scale) + shift
            y = nn.Conv(self.dim, (3, 3), padding="SAME")(nn.swish(y))
            return y + (x if x.shape == y.shape else nn.Conv(self.dim, (1, 1))(x))

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            b, h, w, c = x.shape
            qkv = nn.Conv(3 * c, (1, 1), use_bias=False)(nn.LayerNorm(use_bias=False)(x))
            q, k, v = jnp.split(qkv.reshape(b, h * w, 3 * H, c // H), 3, axis=2)
            sim = jnp.einsum("bihd,bjhd->bhij", q * (c // H) ** -0.5, k)
            out = jnp.einsum("bhij,bjhd->bihd", nn.softmax(sim), v)
            return x + nn.Conv(c, (1, 1))(out.reshape(b, h, w, c))

    class Unet(nn.Module):
        @nn.compact
        def __call__(self, x, time):
            half = C // 2
            freqs = jnp.exp(jnp.arange(half) * -(jnp.log(10000.0) / (half - 1)))
            angle = time[:, None] * freqs[None]
            t = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
            t = nn.Dense(C)(nn.gelu(nn.Dense(C)(t)))
            x = nn.Conv(16, (7, 7), padding="SAME")(x)
            skips = []
            for dim in (16, 32):
                x = ResBlock(dim)(x, t)
                skips.append(x)
                x = nn.Conv(dim, (4, 4), strides=(2, 2))(x)
            x = ResBlock(32)(Attention()(ResBlock(32)(x, t)), t)
            for dim in (32, 16):
                b, h, w, c = x.shape
                x = jax.image.resize(x, (b, h * 2, w * 2, c), "nearest")
                x = nn.Conv(dim, (3, 3), padding="SAME")(x)
                x = ResBlock(dim)(jnp.concatenate([x, skips.pop()], axis=-1), t)
            return nn.Conv(3, (1, 1))(nn.swish(nn.GroupNorm(4)(x)))

    model = Unet()

    def init(key):
        return moved(key, model.init(key, jnp.zeros((1, 8, 8, 3)), jnp.zeros((1,))))

    def loss(params, batch):
        x, t, noise = batch["image"], batch["time"], batch["noise"]
        alpha = jnp.cos(t * jnp.pi / 2)[:, None, None, None]
        noisy = alpha * x + jnp.sqrt(1 - alpha**2) * noise
        return jnp.mean(jnp.abs(model.apply(params, noisy, t * 1000) - noise))

    def batch(draws):
        time = draws.uniform(0.1, 0.9, SAMPLES).astype(np.float32)
        return {
            "image": numbers(draws, 8, 8, 3),
            "noise": numbers(draws, 8, 8, 3),
            "time": time,
        }

    return Parts(init, loss, batch)


@kind("LSTM tagger", "Linen", "github.com/google/flax, examples/sst2/models.py; examples/seq2seq")
def lstm():
    """`nn.RNN` of LSTM cells forward and back over words of several lengths, dropout by a key."""
    length, vocabulary = 8, 64

    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, ids, lengths, train):
            x = nn.Embed(vocabulary, C)(ids)
            x = nn.Dropout(0.1, deterministic=not train)(x)
            forward = nn.RNN(nn.OptimizedLSTMCell(C))
            backward = nn.RNN(nn.OptimizedLSTMCell(C))
            x = nn.Bidirectional(forward, backward)(x, seq_lengths=lengths)
            mask = jnp.arange(length)[None] < lengths[:, None]
            keys = nn.Dense(C, use_bias=False)(x)
            scores = nn.Dense(1, use_bias=False)(jnp.tanh(keys))[..., 0]
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
            x = jnp.einsum("bs,bsc->bc", weights, x)
            return nn.Dense(2)(nn.tanh(nn.Dense(C)(x)))

    model = Classifier()

    def init(key):
        ids, lengths = jnp.zeros((1, length), jnp.int32), jnp.ones((1,), jnp.int32)
        return moved(key, model.init(key, ids, lengths, False))

    def loss(params, batch):
        rngs = {"dropout": batch["key"]}
        logits = model.apply(params, batch["ids"], batch["lengths"], True, rngs=rngs)
        return mean_cross_entropy(logits, batch["label"])

    def batch(draws):
        return {
            "ids": classes(draws, vocabulary, length),
            "lengths": draws.integers(1, length + 1, SAMPLES).astype(np.int32),
            "label": classes(draws, 2),
        }

    return Parts(init, loss, batch, keyed=True)


@kind("lm1b", "Linen", "github.com/google/flax, examples/lm1b/models.py")
def lm1b():
    """`nn.MultiHeadDotProductAttention` with `nn.combine_masks`, layers by `nn.scan`, remat."""
    length, vocabulary = 8, 64

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            y = nn.LayerNorm()(x)
            y = nn.MultiHeadDotProductAttention(
                num_heads=H, qkv_features=C, use_bias=False, deterministic=True
            )(y, y, mask=mask)
            x = x + y
            y = nn.Dense(C)(nn.relu(nn.Dense(64)(nn.LayerNorm()(x))))
            return x + y, None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            mask = nn.combine_masks(
                nn.make_attention_mask(ids > 0, ids > 0), nn.make_causal_mask(ids)
            )
            embed = nn.Embed(vocabulary, C, embedding_init=nn.initializers.normal(1.0))
            x = embed(ids) + self.param("places", nn.initializers.normal(0.02), (length, C))
            layers = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=2,
            )
            x, _ = layers()(x, mask)
            x = nn.LayerNorm()(x)
            return embed.attend(x) / jnp.sqrt(C)

    model = Model()

    def init(key):
        return moved(key, model.init(key, jnp.zeros((1, length), jnp.int32)))

    def loss(params, batch):
        logits = model.apply(params, batch["tokens"])
        return mean_cross_entropy(logits, batch["labels"])

    def batch(draws):
        return {n: 1 + classes(draws, vocabulary - 1, length) for n in ("tokens", "labels")}

    return Parts(init, loss, batch)


@kind("BiT", "Linen", "github.com/google-research/big_transfer, "
      "bit_jax/models.py")  # fmt: skip
def bit():
    """Kernels standardised before each convolution, GroupNorm before activations, a pooled head."""

    class StdConv(nn.Conv):
        def param(self, name, *args, **kwargs):
            made = super().param(name, *args, **kwargs)
            if name == "kernel":
                made = made - jnp.mean(made, axis=(0, 1, 2))
                made = made / (jnp.std(made, axis=(0, 1, 2)) + 1e-5)
            return made

    class Unit(nn.Module):
        width: int
        stride: int

        @nn.compact
        def __call__(self, x):
            y = nn.relu(nn.GroupNorm(8)(x))
            skip = x
            if x.shape[-1] != self.width or self.stride != 1:
                skip = StdConv(self.width, (1, 1), (self.stride,) * 2, use_bias=False)(y)
            y = StdConv(self.width, (3, 3), (self.stride,) * 2, use_bias=False)(y)
            y = StdConv(self.width, (3, 3), use_bias=False)(nn.relu(nn.GroupNorm(8)(y)))
            return skip + y

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = StdConv(16, (3, 3), use_bias=False)(x)
            x = Unit(32, 2)(Unit(16, 1)(x))
            x = nn.relu(nn.GroupNorm(8)(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
            return nn.Dense(10)(jnp.mean(x, axis=(1, 2)))

    model = Net()

    def init(key):
        return moved(key, model.init(key, jnp.zeros((1, 8, 8, 3))))

    def loss(params, batch):
        return mean_cross_entropy(model.apply(params, batch["image"]), batch["label"])

    def batch(draws):
        return {"image": numbers(draws, 8, 8, 3), "label": classes(draws, 10)}

    return Parts(init, loss, batch)
