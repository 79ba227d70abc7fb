"""Language models in plain JAX."""

import functools
import math

import jax
import jax.numpy as jnp

from benchmarks.jax_zoo_models.frame import Parts, drawn, kind, tokens

C, H, S, V, LAYERS = 32, 8, 8, 64, 2
D = C // H


def cross_entropy(logits, labels):
    """The mean over tokens of [b, s, v] and [b, s]."""
    logits = logits.astype(jnp.float32) if logits.dtype == jnp.bfloat16 else logits
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.scipy.special.logsumexp(logits, axis=-1) - picked).mean()


def layer_norm(x, g, b, eps=1e-5):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return g * (x - mean) / jnp.sqrt(variance + eps) + b


def rms_norm(x, w, eps=1e-6):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * w


@kind("GPT-2", "plain JAX", "github.com/jaymody/picoGPT, gpt2.py")
def gpt2():
    def gelu(x):
        return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))

    def softmax(x):
        exp_x = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        return exp_x / jnp.sum(exp_x, axis=-1, keepdims=True)

    def linear(x, w, b):
        return x @ w + b

    def attention(q, k, v, mask):
        return softmax(q @ k.T / jnp.sqrt(q.shape[-1]) + mask) @ v

    def mha(x, c_attn, c_proj):
        x = linear(x, **c_attn)
        heads = [jnp.split(part, H, axis=-1) for part in jnp.split(x, 3, axis=-1)]
        mask = (1 - jnp.tri(x.shape[0], dtype=x.dtype)) * -1e10
        out = [attention(q, k, v, mask) for q, k, v in zip(*heads, strict=True)]
        return linear(jnp.hstack(out), **c_proj)

    def block(x, mlp, attn, ln_1, ln_2):
        x = x + mha(layer_norm(x, **ln_1), **attn)
        h = gelu(linear(layer_norm(x, **ln_2), **mlp["c_fc"]))
        return x + linear(h, **mlp["c_proj"])

    def logits_of(inputs, wte, wpe, blocks, ln_f):
        x = wte[inputs] + wpe[jnp.arange(len(inputs))]
        for each in blocks:
            x = block(x, **each)
        return layer_norm(x, **ln_f) @ wte.T

    def loss(params, batch):
        logits = jax.vmap(functools.partial(logits_of, **params))(batch["tokens"])
        return cross_entropy(logits, batch["labels"])

    norm = {"g": (C,), "b": (C,)}
    affine = lambda k, n: {"w": (k, n), "b": (n,)}  # noqa: E731
    shapes = {
        "wte": (V, C),
        "wpe": (S, C),
        "blocks": [
            {
                "mlp": {"c_fc": affine(C, 4 * C), "c_proj": affine(4 * C, C)},
                "attn": {"c_attn": affine(C, 3 * C), "c_proj": affine(C, C)},
                "ln_1": norm,
                "ln_2": norm,
            }
            for _ in range(LAYERS)
        ],
        "ln_f": norm,
    }
    return Parts(lambda key: drawn(key, shapes), loss, tokens(S, V, "tokens", "labels"))


def rotated(x, theta=10000.0):
    """[b, s, h, d], neighbours in pairs."""
    s, d = x.shape[1], x.shape[-1]
    freqs = 1.0 / (theta ** (jnp.arange(0, d, 2)[: d // 2].astype(x.dtype) / d))
    angles = jnp.outer(jnp.arange(s), freqs)
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    even, odd = x[..., ::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)


@kind("Llama", "plain JAX", "github.com/ayaka14732/llama-2-jax, lib/llama")
def llama():
    """Grouped queries in the shape of the matrices, layers by scan, each checkpointed."""
    rep, groups = 2, H // 2

    def attention(p, x, mask):
        q = jnp.einsum("bsm,mrhk->brhsk", x, p["q"])
        k = jnp.einsum("bdm,mhk->bhdk", x, p["k"])
        v = jnp.einsum("bdm,mhv->bhdv", x, p["v"])
        q = rotated(q.reshape(-1, H, *q.shape[3:]).swapaxes(1, 2)).swapaxes(1, 2)
        q = q.reshape(x.shape[0], rep, groups, *q.shape[2:])
        k = rotated(k.swapaxes(1, 2)).swapaxes(1, 2)
        qk = jnp.einsum("brhsk,bhdk->brhsd", q, k) / math.sqrt(D)
        qk = jax.nn.softmax(qk, where=mask)
        qk = jnp.where(mask, qk, 0)
        qkv = jnp.einsum("brhsd,bhdv->brhsv", qk, v)
        return jnp.einsum("brhsv,rhvm->bsm", qkv, p["out"])

    @jax.checkpoint
    def layer(x, p):
        s = x.shape[1]
        mask = jnp.tril(jnp.ones((s, s), dtype=bool))[None, None, None]
        x = x + attention(p["attention"], rms_norm(x, p["input_norm"]), mask)
        h = rms_norm(x, p["post_norm"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None

    def loss(params, batch):
        x = params["embedding"][batch["tokens"]]
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return cross_entropy(rms_norm(x, params["norm"]) @ params["lm_head"], batch["labels"])

    n = LAYERS
    shapes = {
        "embedding": (V, C),
        "layers": {
            "input_norm": (n, C),
            "attention": {
                "q": (n, C, rep, groups, D),
                "k": (n, C, groups, D),
                "v": (n, C, groups, D),
                "out": (n, rep, groups, D, C),
            },
            "post_norm": (n, C),
            "gate": (n, C, 2 * C),
            "up": (n, C, 2 * C),
            "down": (n, 2 * C, C),
        },
        "norm": (C,),
        "lm_head": (C, V),
    }
    return Parts(lambda key: drawn(key, shapes), loss, tokens(S, V, "tokens", "labels"))


@kind("RetNet", "plain JAX", "github.com/syncdoth/RetNet, retnet/modeling_retnet.py")
def retnet():
    """Retention in its parallel form: a decay mask a head, a group norm, a swish gate."""

    def decay():
        gammas = 1 - jnp.exp(jnp.linspace(math.log(1 / 32), math.log(1 / 512), H))
        n, m = jnp.arange(S)[:, None], jnp.arange(S)[None, :]
        powers = jnp.where(n >= m, n - m, 0)
        mask = jnp.where(n >= m, gammas[:, None, None] ** powers, 0.0)
        return mask / jnp.sqrt(mask.sum(-1, keepdims=True))

    def retention(p, x, mask):
        q, k, v = (jnp.einsum("bsc,chd->bhsd", x, p[n]) for n in "qkv")
        q = rotated(q.swapaxes(1, 2)).swapaxes(1, 2)
        k = rotated((k * D**-0.5).swapaxes(1, 2)).swapaxes(1, 2)
        scores = (q @ k.swapaxes(-1, -2)) * mask
        scores = scores / jnp.clip(jnp.abs(jax.lax.stop_gradient(scores)).sum(-1, keepdims=True), 1)
        out = scores @ v
        mean, var = out.mean(-1, keepdims=True), out.var(-1, keepdims=True)
        out = ((out - mean) / jnp.sqrt(var + 1e-5)).swapaxes(1, 2).reshape(*x.shape[:2], C)
        return (jax.nn.silu(x @ p["g"]) * out) @ p["o"]

    def loss(params, batch):
        x, mask = params["embed"][batch["tokens"]], decay()

        def layer(x, p):
            x = x + retention(p, layer_norm(x, 1.0, 0.0), mask)
            return x + jax.nn.gelu(layer_norm(x, 1.0, 0.0) @ p["up"]) @ p["down"], None

        x, _ = jax.lax.scan(layer, x, params["layers"])
        return cross_entropy(x @ params["head"], batch["labels"])

    n = LAYERS
    shapes = {
        "embed": (V, C),
        "layers": {
            **{name: (n, C, H, D) for name in "qkv"},
            "g": (n, C, C),
            "o": (n, C, C),
            "up": (n, C, 64),
            "down": (n, 64, C),
        },
        "head": (C, V),
    }
    return Parts(lambda key: drawn(key, shapes), loss, tokens(S, V, "tokens", "labels"))


@kind("Gemma 2", "plain JAX", "github.com/google-deepmind/gemma, gemma/gm/nn/_modules.py")
def gemma():
    """Local and global layers in turn, soft caps of scores and logits, grouped queries, rotary by
    halves, norms behind as well as before, weights as an offset to one."""
    groups, window = 4, 4

    def norm(x, scale):
        var = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(var + 1e-06) * (1 + scale)

    def rope(x, positions):
        fraction = 2 * jnp.arange(0, D // 2) / D
        angle = positions[..., None] / 10_000**fraction
        angle = angle[..., None, :]
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(
            x.dtype
        )

    def attention(p, x, positions, mask, local):
        q = jnp.einsum("BTD,NDH->BTNH", x, p["q"])
        k, v = jnp.einsum("BSD,CKDH->CBSKH", x, p["kv"])
        q, k = rope(q, positions) * D**-0.5, rope(k, positions)
        b, t = x.shape[:2]
        q = q.reshape(b, t, groups, H // groups, D)
        logits = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(b, t, H, -1)
        logits = jnp.tanh(logits / 50.0) * 50.0
        if local:
            every = jnp.ones_like(mask)
            mask = mask * jnp.triu(every, -window + 1) * jnp.tril(every, window - 1)
        padded = jnp.where(jnp.expand_dims(mask, -2), logits, -2.3819763e38)
        probs = jax.nn.softmax(padded, axis=-1).astype(k.dtype)
        probs = probs.reshape(b, t, groups, H // groups, -1)
        encoded = jnp.einsum("BTKGS,BSKH->BTKGH", probs, v).reshape(b, t, H, D)
        return jnp.einsum("BTNH,NHD->BTD", encoded, p["o"])

    def loss(params, batch):
        ids = batch["tokens"]
        present = ids != 0
        positions = jnp.cumsum(present, axis=-1)
        positions = positions - (positions >= 1)
        mask = present[..., None, :] * jnp.tril(jnp.ones((1, S, S), dtype=jnp.bool_))
        x = params["embedding"][(ids,)] * jnp.sqrt(C).astype(params["embedding"].dtype)
        for i, p in enumerate(params["layers"]):
            y = attention(p["attn"], norm(x, p["pre"]), positions, mask, i % 2 == 0)
            x = x + norm(y, p["post"])
            gate = jnp.einsum("...F,NHF->...NH", norm(x, p["pre_ffw"]), p["gating"])
            y = jax.nn.gelu(gate[..., 0, :]) * gate[..., 1, :]
            x = x + norm(jnp.einsum("...H,HF->...F", y, p["linear"]), p["post_ffw"])
        logits = jnp.dot(norm(x, params["norm"]), params["embedding"].T)
        logits = jnp.tanh(logits / 30.0) * 30.0
        return cross_entropy(logits, batch["labels"])

    layer = {
        "attn": {"q": (H, C, D), "kv": (2, groups, C, D), "o": (H, D, C)},
        "gating": (2, 64, C),
        "linear": (64, C),
        **{n: (C,) for n in ("pre", "post", "pre_ffw", "post_ffw")},
    }
    shapes = {"embedding": (V, C), "norm": (C,), "layers": [layer] * LAYERS}
    return Parts(lambda key: drawn(key, shapes), loss, tokens(S, V, "tokens", "labels"))


@kind("gMLP", "plain JAX", "github.com/SauravMaheshkar/gMLP, gmlp/layers.py")
def gmlp():
    """No attention: a gate from a projection along the tokens."""

    def loss(params, batch):
        x = params["embed"][batch["tokens"]]
        for p in params["layers"]:
            h = jax.nn.gelu(layer_norm(x, **p["norm"]) @ p["in"] + p["in_bias"])
            u, v = jnp.split(h, 2, axis=-1)
            v = layer_norm(v, **p["gate_norm"])
            weights = p["spatial"] * jnp.tril(jnp.ones((S, S)))
            v = jnp.einsum("bnd,mn->bmd", v, weights) + p["spatial_bias"][:, None]
            x = x + (u * v) @ p["out"] + p["out_bias"]
        logits = layer_norm(x, **params["norm"]) @ params["head"]
        return cross_entropy(logits, batch["labels"])

    def init(key):
        layer = {
            "norm": {"g": (C,), "b": (C,)},
            "in": (C, 64),
            "in_bias": (64,),
            "gate_norm": {"g": (32,), "b": (32,)},
            "spatial": (S, S),
            "spatial_bias": (S,),
            "out": (32, C),
            "out_bias": (C,),
        }
        shapes = {"embed": (V, C), "layers": [layer] * LAYERS, "head": (C, V)}
        return drawn(key, {**shapes, "norm": {"g": (C,), "b": (C,)}})

    return Parts(init, loss, tokens(S, V, "tokens", "labels"))
