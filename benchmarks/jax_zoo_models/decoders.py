"""Language models in plain JAX."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.jax_zoo_models.frame import SAMPLES, Parts, classes, drawn, kind, numbers, tokens

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


@kind("T5", "plain JAX", "github.com/google-research/t5x, examples/t5/layers.py")
def t5():
    """Encoder and decoder, relative buckets, unscaled products, tied head divided by the root."""
    buckets, farthest = 8, 16

    def bucket_of(relative, bidirectional):
        ret, n = 0, -relative
        half = buckets
        if bidirectional:
            half //= 2
            ret += (n < 0).astype(np.int32) * half
            n = np.abs(n)
        else:
            n = np.maximum(n, 0)
        exact = half // 2
        large = exact + (
            np.log(n.astype(np.float32) / exact + np.finfo(np.float32).eps)
            / np.log(farthest / exact)
            * (half - exact)
        ).astype(np.int32)
        return ret + np.where(n < exact, n, np.minimum(large, half - 1))

    def relative_bias(embedding, q, k, bidirectional):
        relative = np.arange(k)[None, :] - np.arange(q)[:, None]
        rp_bucket = bucket_of(relative, bidirectional)
        one_hot = jax.lax.broadcasted_iota(jnp.int32, (buckets, 1, 1), 0) == rp_bucket[None]
        values = jax.lax.dot_general(
            embedding, one_hot.astype(embedding.dtype), (((1,), (0,)), ((), ()))
        )
        return values[None]

    def attend(p, x, memory, bias):
        q, k, v = (jnp.einsum("bsc,chd->bshd", y, p[n]) for n, y in zip("qkv", (x, memory, memory)))
        weights = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        weights = weights if bias is None else weights + bias
        weights = jax.nn.softmax(weights)
        return jnp.einsum("bhqd,hdc->bqc", jnp.einsum("bhqk,bkhd->bhqd", weights, v), p["o"])

    def mlp(p, x):
        return (jax.nn.gelu(x @ p["wi_0"]) * (x @ p["wi_1"])) @ p["wo"]

    def padding(ids, q):
        allowed = (ids > 0)[:, None, None, :] * jnp.ones((1, 1, q, 1), bool)
        return jnp.where(allowed, 0.0, -1e10)

    def loss(params, batch):
        source, target = batch["inputs"], batch["targets"]
        shifted = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
        s, t = source.shape[1], target.shape[1]
        bias = relative_bias(params["encoder_bias"], s, s, True) + padding(source, s)
        x = params["shared"][source]
        for p in params["encoder"]:
            h = rms_norm(x, p["norm1"])
            x = x + attend(p["self"], h, h, bias)
            x = x + mlp(p["mlp"], rms_norm(x, p["norm2"]))
        memory = rms_norm(x, params["encoder_norm"])
        causal = jnp.where(jnp.tril(jnp.ones((t, t), bool)), 0.0, -1e10)
        bias = relative_bias(params["decoder_bias"], t, t, False) + causal
        y = params["shared"][shifted]
        for p in params["decoder"]:
            h = rms_norm(y, p["norm1"])
            y = y + attend(p["self"], h, h, bias)
            y = y + attend(p["cross"], rms_norm(y, p["norm3"]), memory, padding(source, t))
            y = y + mlp(p["mlp"], rms_norm(y, p["norm2"]))
        y = rms_norm(y, params["decoder_norm"]) / np.sqrt(C)
        logits = y @ params["shared"].T
        weights = (target > 0).astype(logits.dtype)
        one_hot = jax.nn.one_hot(target, V, dtype=logits.dtype)
        losses = -jnp.sum(one_hot * jax.nn.log_softmax(logits), axis=-1)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        return jnp.sum((losses + 1e-4 * jnp.square(log_z)) * weights) / jnp.sum(weights)

    attention = {**{n: (C, H, D) for n in "qkv"}, "o": (H, D, C)}
    block = {
        "norm1": (C,),
        "norm2": (C,),
        "self": attention,
        "mlp": {"wi_0": (C, 64), "wi_1": (C, 64), "wo": (64, C)},
    }
    shapes = {
        "shared": (V, C),
        "encoder_bias": (H, buckets),
        "decoder_bias": (H, buckets),
        "encoder": [block] * LAYERS,
        "decoder": [{**block, "cross": attention, "norm3": (C,)}] * LAYERS,
        "encoder_norm": (C,),
        "decoder_norm": (C,),
    }
    return Parts(lambda key: drawn(key, shapes), loss, tokens(S, V, "inputs", "targets"))


@kind("Transformer-XL", "plain JAX", "github.com/kimiyoung/transformer-xl, tf/model.py")
def transformer_xl():
    """Memory of the segment before as a batch entry, relative shift of scores, two biases."""
    m = 4

    def sinusoid(length, dtype):
        inverse = 1.0 / (10000 ** (jnp.arange(0, C, 2.0, dtype=dtype) / C))
        angle = jnp.einsum("i,j->ij", jnp.arange(length - 1, -1, -1.0, dtype=dtype), inverse)
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)

    def rel_shift(x):
        b, h, q, k = x.shape
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (1, 0)))
        return x.reshape(b, h, k + 1, q)[:, :, 1:].reshape(b, h, q, k)

    def attention(p, w, mems, r, u, v):
        cat = jnp.concatenate([mems, w], axis=1)
        heads = jnp.einsum("bsc,cnhd->nbshd", cat, p["qkv"])
        q, k, value = heads[0][:, -S:], heads[1], heads[2]
        r_k = jnp.einsum("rc,chd->rhd", r, p["r"])
        ac = jnp.einsum("bihd,bjhd->bhij", q + u, k)
        bd = rel_shift(jnp.einsum("bihd,jhd->bhij", q + v, r_k))
        mask = jnp.triu(jnp.ones((S, S + m)), 1 + m)
        score = (ac + bd) / D**0.5 * (1 - mask) - 1e30 * mask
        prob = jax.nn.softmax(score, axis=-1)
        return jnp.einsum("bhij,bjhd,hdc->bic", prob, value, p["o"])

    def loss(params, batch):
        x = params["table"][batch["tokens"]] * C**0.5
        r = sinusoid(S + m, x.dtype)
        for i, p in enumerate(params["layers"]):
            mems = jax.lax.stop_gradient(batch["memory"][:, i])
            y = attention(p, x, mems, r, params["u"], params["v"])
            x = layer_norm(x + y, **p["norm1"])
            y = jax.nn.relu(x @ p["up"] + p["b1"]) @ p["down"] + p["b2"]
            x = layer_norm(x + y, **p["norm2"])
        return cross_entropy(x @ params["table"].T + params["bias"], batch["labels"])

    norm = {"g": (C,), "b": (C,)}
    layer = {
        "qkv": (C, 3, H, D),
        "r": (C, H, D),
        "o": (H, D, C),
        "norm1": norm,
        "norm2": norm,
        "up": (C, 64),
        "b1": (64,),
        "down": (64, C),
        "b2": (C,),
    }
    shapes = {
        "table": (V, C),
        "u": (H, D),
        "v": (H, D),
        "bias": (V,),
        "layers": [layer] * LAYERS,
    }

    def batch(draws):
        ids = tokens(S, V, "tokens", "labels")(draws)
        return {**ids, "memory": numbers(draws, LAYERS, m, C)}

    return Parts(lambda key: drawn(key, shapes), loss, batch)


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


@kind("BERT", "plain JAX", "github.com/huggingface/transformers, modeling_flax_bert.py")
def bert():
    """Masked words predicted at places that are gathered, a padding mask, two segments."""
    places = 2

    def dense(p, x):
        return x @ p["kernel"] + p["bias"]

    def attention(p, x, bias):
        b, s, _ = x.shape
        q, k, v = (dense(p[n], x).reshape((b, s, H, D)) for n in ("query", "key", "value"))
        q = q / jnp.sqrt(D).astype(x.dtype)
        weights = jnp.einsum("...qhd,...khd->...hqk", q, k) + bias
        weights = jax.nn.softmax(weights).astype(x.dtype)
        return jnp.einsum("...hqk,...khd->...qhd", weights, v).reshape((b, s, -1))

    def loss(params, batch):
        e = params["embeddings"]
        ids = jnp.arange(S)[None]
        x = (
            jnp.take(e["word"], batch["input_ids"], axis=0)
            + jnp.take(e["position"], ids, axis=0)
            + jnp.take(e["type"], batch["token_type_ids"], axis=0)
        )
        x = layer_norm(x, **e["norm"], eps=1e-12)
        mask = jnp.expand_dims(batch["attention_mask"], axis=(-3, -2))
        bias = jax.lax.select(
            mask > 0,
            jnp.full(mask.shape, 0.0).astype(x.dtype),
            jnp.full(mask.shape, jnp.finfo(x.dtype).min).astype(x.dtype),
        )
        for p in params["layers"]:
            y = dense(p["output"], attention(p["self"], x, bias))
            x = layer_norm(y + x, **p["norm1"], eps=1e-12)
            y = dense(p["down"], jax.nn.gelu(dense(p["up"], x), approximate=False))
            x = layer_norm(y + x, **p["norm2"], eps=1e-12)
        spots = batch["positions"]
        picked = jnp.take_along_axis(x, spots[..., None], axis=1)
        h = jax.nn.gelu(dense(params["transform"], picked), approximate=False)
        logits = layer_norm(h, **params["norm"], eps=1e-12) @ e["word"].T + params["bias"]
        chosen = jax.nn.one_hot(batch["labels"], V, dtype=logits.dtype)
        words = -jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1).mean()
        pooled = jnp.tanh(dense(params["pooler"], x[:, 0]))
        scores = jax.nn.log_softmax(dense(params["next"], pooled))
        following = -jnp.take_along_axis(scores, batch["next"][:, None], axis=-1).mean()
        return words + following

    def affine(k, n):
        return {"kernel": (k, n), "bias": (n,)}

    norm = {"g": (C,), "b": (C,)}
    layer = {
        "self": {n: affine(C, C) for n in ("query", "key", "value")},
        "output": affine(C, C),
        "up": affine(C, 64),
        "down": affine(64, C),
        "norm1": norm,
        "norm2": norm,
    }
    shapes = {
        "embeddings": {"word": (V, C), "position": (S, C), "type": (2, C), "norm": norm},
        "layers": [layer] * LAYERS,
        "transform": affine(C, C),
        "norm": norm,
        "bias": (V,),
        "pooler": affine(C, C),
        "next": affine(C, 2),
    }

    def batch(draws):
        lengths = draws.integers(3, S + 1, SAMPLES)
        return {
            "input_ids": classes(draws, V, S),
            "token_type_ids": classes(draws, 2, S),
            "attention_mask": (np.arange(S) < lengths[:, None]).astype(np.int32),
            "positions": classes(draws, S, places),
            "labels": classes(draws, V, places),
            "next": classes(draws, 2),
        }

    return Parts(lambda key: drawn(key, shapes), loss, batch)
