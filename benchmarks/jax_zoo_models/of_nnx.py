"""Models of Flax NNX: modules of objects, split into a graph and parameters."""

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.jax_zoo_models.frame import Parts, classes, kind, numbers

C, H = 32, 8


def mean_cross_entropy(logits, labels):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -picked.mean()


def parts(model, loss, batch, **more):
    """``model(rngs)`` makes the module; ``loss(module, batch)``. Parameters are those of type
    `nnx.Param`, all else stays in the graph as it was made."""
    graphdef, params, rest = nnx.split(model(nnx.Rngs(0)), nnx.Param, ...)

    def init(key):
        made = nnx.state(model(nnx.Rngs(key)), nnx.Param)
        leaves = jax.tree.leaves(made)
        keys = jax.random.split(key, len(leaves))
        moved = [
            a + 0.05 * jax.random.normal(k, a.shape) for k, a in zip(keys, leaves, strict=True)
        ]
        return nnx.to_pure_dict(jax.tree.unflatten(jax.tree.structure(made), moved))

    def of(tree, given):
        state = nnx.State(params)
        nnx.replace_by_pure_dict(state, tree)
        return loss(nnx.merge(graphdef, state, rest), given)

    return Parts(init, of, batch, **more)


@kind("ViT", "NNX", "github.com/google/flax, examples/nnx: vit; jax-ai-stack, vision transformer")
def vit():
    patch, size, classes_count = 4, 16, 10

    class Encoder(nnx.Module):
        def __init__(self, rngs):
            self.norm1 = nnx.LayerNorm(C, rngs=rngs)
            self.attn = nnx.MultiHeadAttention(
                num_heads=H, in_features=C, dropout_rate=0.0, decode=False, rngs=rngs
            )
            self.norm2 = nnx.LayerNorm(C, rngs=rngs)
            self.mlp = nnx.Sequential(
                nnx.Linear(C, 64, rngs=rngs), nnx.gelu, nnx.Linear(64, C, rngs=rngs)
            )

        def __call__(self, x):
            x = x + self.attn(self.norm1(x), deterministic=True)
            return x + self.mlp(self.norm2(x))

    class VisionTransformer(nnx.Module):
        def __init__(self, rngs):
            patches = (size // patch) ** 2
            self.patch = nnx.Conv(
                3, C, (patch, patch), strides=(patch, patch), padding="VALID", rngs=rngs
            )
            start = jax.nn.initializers.truncated_normal(0.02)
            self.positions = nnx.Param(start(rngs.params(), (1, patches + 1, C), jnp.float32))
            self.token = nnx.Param(jnp.zeros((1, 1, C)))
            self.encoder = nnx.Sequential(*[Encoder(rngs) for _ in range(2)])
            self.norm = nnx.LayerNorm(C, rngs=rngs)
            self.head = nnx.Linear(C, classes_count, rngs=rngs)

        def __call__(self, x):
            patches = self.patch(x)
            b = patches.shape[0]
            patches = patches.reshape(b, -1, C)
            token = jnp.tile(self.token[...], [b, 1, 1])
            x = jnp.concat([token, patches], axis=1) + self.positions[...]
            return self.head(self.norm(self.encoder(x))[:, 0])

    def loss(model, batch):
        return mean_cross_entropy(model(batch["image"]), batch["label"])

    def batch(draws):
        return {"image": numbers(draws, size, size, 3), "label": classes(draws, classes_count)}

    return parts(VisionTransformer, loss, batch)


@kind("MiniGPT", "NNX", "docs.jaxstack.ai, JAX_for_LLM_pretraining (miniGPT)")
def mini_gpt():
    """`nnx.Embed` of words and places, a causal mask of ones and zeros, dropout left out."""
    length, vocabulary = 8, 64

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.mha = nnx.MultiHeadAttention(num_heads=H, in_features=C, rngs=rngs)
            self.norm1 = nnx.LayerNorm(epsilon=1e-6, num_features=C, rngs=rngs)
            self.linear1 = nnx.Linear(in_features=C, out_features=64, rngs=rngs)
            self.linear2 = nnx.Linear(in_features=64, out_features=C, rngs=rngs)
            self.norm2 = nnx.LayerNorm(epsilon=1e-6, num_features=C, rngs=rngs)

        def __call__(self, x):
            s = x.shape[1]
            mask = jnp.tril(jnp.ones((s, s)))
            y = self.mha(inputs_q=x, mask=mask, decode=False)
            x = self.norm1(x + y)
            return self.norm2(x + self.linear2(nnx.relu(self.linear1(x))))

    class MiniGPT(nnx.Module):
        def __init__(self, rngs):
            self.words = nnx.Embed(num_embeddings=vocabulary, features=C, rngs=rngs)
            self.places = nnx.Embed(num_embeddings=length, features=C, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.out = nnx.Linear(in_features=C, out_features=vocabulary, rngs=rngs)

        def __call__(self, ids):
            positions = jnp.arange(0, ids.shape[1])[None, :]
            x = self.words(ids) + self.places(positions)
            for each in self.blocks:
                x = each(x)
            return self.out(x)

    def loss(model, batch):
        return mean_cross_entropy(model(batch["tokens"]), batch["labels"])

    def batch(draws):
        return {n: classes(draws, vocabulary, length) for n in ("tokens", "labels")}

    return parts(MiniGPT, loss, batch)


@kind(
    "DiT",
    "NNX",
    "github.com/facebookresearch/DiT, models.py (NNX: kvfrans/jax-diffusion-transformer)",
)
def dit():
    """Noise at a step of the schedule from the batch's key; blocks modulated by step and class."""
    size, patch, steps = 8, 2, 100

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(C, use_bias=False, use_scale=False, rngs=rngs)
            self.attn = nnx.MultiHeadAttention(num_heads=H, in_features=C, decode=False, rngs=rngs)
            self.up = nnx.Linear(C, 64, rngs=rngs)
            self.down = nnx.Linear(64, C, rngs=rngs)
            self.modulation = nnx.Linear(C, 6 * C, rngs=rngs)

        def __call__(self, x, c):
            c = self.modulation(nnx.silu(c))
            shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(c, 6, axis=-1)
            h = self.norm(x) * (1 + scale1[:, None]) + shift1[:, None]
            x = x + gate1[:, None] * self.attn(h)
            h = self.norm(x) * (1 + scale2[:, None]) + shift2[:, None]
            return x + gate2[:, None] * self.down(nnx.gelu(self.up(h)))

    class DiT(nnx.Module):
        def __init__(self, rngs):
            self.patch = nnx.Conv(
                3, C, (patch, patch), strides=(patch, patch), padding="VALID", rngs=rngs
            )
            self.time1 = nnx.Linear(C, C, rngs=rngs)
            self.time2 = nnx.Linear(C, C, rngs=rngs)
            self.classes = nnx.Embed(10, C, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.norm = nnx.LayerNorm(C, use_bias=False, use_scale=False, rngs=rngs)
            self.final = nnx.Linear(C, 2 * C, rngs=rngs)
            self.out = nnx.Linear(C, patch * patch * 3, rngs=rngs)

        def embedded(self, t):
            half = C // 2
            freqs = jnp.exp(-jnp.log(10000.0) * jnp.arange(half) / half)
            angle = t[:, None].astype(jnp.float32) * freqs[None]
            h = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
            return self.time2(nnx.silu(self.time1(h)))

        def __call__(self, x, t, label):
            n = size // patch
            x = self.patch(x).reshape(x.shape[0], n * n, C)
            where = jnp.arange(n * n)[:, None] / 10000 ** (jnp.arange(C // 2) / (C // 2))
            x = x + jnp.concatenate([jnp.sin(where), jnp.cos(where)], -1)
            c = self.embedded(t) + self.classes(label)
            for each in self.blocks:
                x = each(x, c)
            shift, scale = jnp.split(self.final(nnx.silu(c)), 2, axis=-1)
            x = self.out(self.norm(x) * (1 + scale[:, None]) + shift[:, None])
            x = x.reshape(x.shape[0], n, n, patch, patch, 3)
            return jnp.einsum("bhwpqc->bhpwqc", x).reshape(x.shape[0], size, size, 3)

    def loss(model, batch):
        x = batch["image"]
        kt, kn = jax.random.split(batch["key"])
        t = jax.random.randint(kt, (x.shape[0],), 0, steps)
        noise = jax.random.normal(kn, x.shape)
        alpha_bar = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, steps))
        a = alpha_bar[t][:, None, None, None]
        noisy = jnp.sqrt(a) * x + jnp.sqrt(1 - a) * noise
        return jnp.mean(jnp.square(model(noisy, t, batch["label"]) - noise))

    def batch(draws):
        return {"image": numbers(draws, size, size, 3), "label": classes(draws, 10)}

    return parts(DiT, loss, batch, keyed=True)


@kind("MLP-Mixer", "NNX", "github.com/google-research/vision_transformer, vit_jax/models_mixer.py")
def mixer():
    """Layers by `nnx.vmap` at their making and `nnx.scan` over them."""
    patches = 16

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm1 = nnx.LayerNorm(C, rngs=rngs)
            self.tokens1 = nnx.Linear(patches, 32, rngs=rngs)
            self.tokens2 = nnx.Linear(32, patches, rngs=rngs)
            self.norm2 = nnx.LayerNorm(C, rngs=rngs)
            self.channels1 = nnx.Linear(C, 64, rngs=rngs)
            self.channels2 = nnx.Linear(64, C, rngs=rngs)

        def __call__(self, x):
            y = jnp.swapaxes(self.norm1(x), 1, 2)
            y = self.tokens2(nnx.gelu(self.tokens1(y)))
            x = x + jnp.swapaxes(y, 1, 2)
            return x + self.channels2(nnx.gelu(self.channels1(self.norm2(x))))

    class Mixer(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=2)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def layers(rngs):
                return Block(rngs)

            self.stem = nnx.Linear(12, C, rngs=rngs)
            self.layers = layers(rngs)
            self.norm = nnx.LayerNorm(C, rngs=rngs)
            self.head = nnx.Linear(C, 10, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x, layer):
                return layer(x)

            x = forward(self.stem(x), self.layers)
            return self.head(jnp.mean(self.norm(x), axis=1))

    def loss(model, batch):
        return mean_cross_entropy(model(batch["patches"]), batch["label"])

    def batch(draws):
        return {"patches": numbers(draws, patches, 12), "label": classes(draws, 10)}

    return parts(Mixer, loss, batch)


@kind("LoRA", "NNX", "flax.readthedocs.io, nnx.LoRA")
def lora():
    """Frozen matrices in the graph, a product of two narrow ones beside each that is trained."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            base = nnx.Linear(C, C, rngs=rngs)
            self.layers = nnx.List(
                [nnx.LoRA(C, 4, C, base_module=base, rngs=rngs) for _ in range(2)]
            )
            self.head = nnx.Linear(C, 10, rngs=rngs)

        def __call__(self, x):
            for each in self.layers:
                x = nnx.tanh(each(x))
            return self.head(x)

    graphdef, trained, frozen = nnx.split(Net(nnx.Rngs(0)), nnx.LoRAParam, ...)

    def init(key):
        moved = [
            jax.random.normal(k, a.shape) * 0.3
            for k, a in zip(jax.random.split(key, 4), jax.tree.leaves(trained), strict=True)
        ]
        return nnx.to_pure_dict(jax.tree.unflatten(jax.tree.structure(trained), moved))

    def loss(params, batch):
        state = nnx.State(trained)
        nnx.replace_by_pure_dict(state, params)
        model = nnx.merge(graphdef, state, frozen)
        return mean_cross_entropy(model(batch["x"]), batch["label"])

    def batch(draws):
        return {"x": numbers(draws, C), "label": classes(draws, 10)}

    return Parts(init, loss, batch)
