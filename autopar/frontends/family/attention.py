"""The attention of a layer: grouped heads, or heads that share a latent vector."""

from __future__ import annotations

from autopar.frontends.family.arch import Arch, LatentAttention
from autopar.frontends.family.draft import Draft

Angles = tuple[str, ...]
"""Cosines and sines of the positions; none where they are learned rows of a table."""


def attention(
    g: Draft, arch: Arch, normed: str, angles: Angles, samples: int, windowed: bool
) -> str:
    """[b, s, hidden] -> [b, s, hidden], the product behind it included; ``windowed``: rows see the
    last `Arch.window` tokens alone."""
    if arch.latent is None:
        q, k, v = _grouped(g, arch, normed, angles, samples)
    else:
        q, k, v = _latent(g, arch, arch.latent, normed, angles, samples)
    shape = (samples, arch.heads, arch.seq, arch.value_dim)
    options = {"causal": arch.causal, "dropout_p": g.dropout, "scale": None}
    if windowed:
        options["window"] = arch.window
    mixed = g.op("attention", "attention", (q, k, v), shape, **options)
    shape = (samples, arch.seq, arch.heads, arch.value_dim)
    y = g.op("transpose", "attention", (mixed,), shape, dims=(0, 2, 1, 3))
    joined = (samples, arch.seq, arch.heads * arch.value_dim)
    y = g.op("reshape", "attention", (y,), joined, shape=joined)
    return g.product("out", y, arch.hidden, arch.has_biases)


def _grouped(
    g: Draft, arch: Arch, normed: str, angles: Angles, samples: int
) -> tuple[str, str, str]:
    """Heads of queries, and fewer of keys and values (Ainslie et al. 2023)."""
    heads = {"q": arch.heads, "k": arch.kv_heads, "v": arch.kv_heads}
    apart = []
    for name, count in heads.items():
        y = g.product(name, normed, count * arch.dim, arch.has_biases)
        apart.append(_by_head(g, y, samples, arch.seq, count, arch.dim))
    for i, count in enumerate((arch.heads, arch.kv_heads)) if angles else ():
        shape = (samples, count, arch.seq, arch.dim)
        apart[i] = g.op("rotary", "attention", (apart[i], *angles), shape, style="half")
    q, k, v = apart
    return q, k, v


def _latent(
    g: Draft, arch: Arch, sizes: LatentAttention, normed: str, angles: Angles, samples: int
) -> tuple[str, str, str]:
    """Queries, keys and values made of short vectors; a part of each key that turns with the
    position is one for all heads (DeepSeek-V2 2024, section 2.1)."""
    b, s, heads, turned = samples, arch.seq, arch.heads, sizes.rope_dim
    plain, value = arch.dim - turned, sizes.value_dim
    y = normed
    if sizes.q_rank:
        y = g.norm("q_norm", g.product("q_down", y, sizes.q_rank, False), True)
    q = _by_head(g, g.product("q", y, heads * arch.dim, False), b, s, heads, arch.dim)
    q_plain, q_turned = _parts(g, q, 3, (plain, turned))
    both = g.product("kv_down", normed, sizes.kv_rank + turned, False)
    short, k_turned = _parts(g, both, 2, (sizes.kv_rank, turned))
    wide = g.product("kv", g.norm("kv_norm", short, True), heads * (plain + value), False)
    wide = _by_head(g, wide, b, s, heads, plain + value)
    k_plain, v = _parts(g, wide, 3, (plain, value))
    one = (b, 1, s, turned)
    k_turned = g.op("reshape", "attention", (k_turned,), one, shape=one)
    shape = (b, heads, s, turned)
    q_turned = g.op("rotary", "attention", (q_turned, *angles), shape, style="half")
    k_turned = g.op("rotary", "attention", (k_turned, *angles), one, style="half")
    k_turned = g.op("expand", "attention", (k_turned,), shape, shape=shape)
    shape = (b, heads, s, arch.dim)
    q = g.op("cat", "attention", (q_plain, q_turned), shape, dim=3)
    return q, g.op("cat", "attention", (k_plain, k_turned), shape, dim=3), v


def _by_head(g: Draft, y: str, samples: int, length: int, heads: int, dim: int) -> str:
    shape = (samples, length, heads, dim)
    y = g.op("reshape", "attention", (y,), shape, shape=shape)
    shape = (samples, heads, length, dim)
    return g.op("transpose", "attention", (y,), shape, dims=(0, 2, 1, 3))


def _parts(g: Draft, x: str, dim: int, sizes: tuple[int, int]) -> tuple[str, str]:
    """Two pieces of the last dim, which is ``dim``."""
    *rows, _ = g.tensors[x].shape
    results = tuple(((*rows, size), "float32") for size in sizes)
    one, other = g.several("split", "attention", (x,), results, dim=dim, sizes=sizes)
    return one, other
