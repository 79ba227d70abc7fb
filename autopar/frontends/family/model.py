"""The graph of a transformer's figures: the inverse of `autopar.frontends.family.read`.

A gated model has the form of Llama (RMSNorm, SiLU, no biases), a plain one that of GPT (LayerNorm,
GELU, biases); positions are learned rows of a table, or turn queries and keys. Nothing is captured:
a kind of layer stands once, as a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.frontends.family.arch import Arch
from autopar.frontends.family.attention import Angles, attention
from autopar.frontends.family.draft import Draft
from autopar.frontends.family.feed_forward import experts, mlp
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Block, Graph

LAYER = "Layer"
BATCH_DIMS = {"tokens": 0, "targets": 0}
"""Of the graph's inputs."""


class NoGraph(UserError):
    """Figures that no graph says; the text names them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Of a layer. windowed: attention sees the last tokens alone; dense: one MLP in a model whose
    other layers have experts."""

    windowed: bool = False
    dense: bool = False

    @property
    def name(self) -> str:
        return f"{'Windowed' if self.windowed else ''}{'Dense' if self.dense else ''}{LAYER}"


def kinds_of(arch: Arch) -> tuple[Kind, ...]:
    """Of every layer: dense ones come first, windowed ones are spread evenly (figures have their
    numbers alone)."""
    windowed = arch.windowed_layers if 0 < arch.window < arch.seq else 0
    return tuple(
        Kind(
            (i + 1) * windowed // arch.layers > i * windowed // arch.layers,
            arch.is_moe and i < arch.dense_layers,
        )
        for i in range(arch.layers)
    )


def unsaid(arch: Arch) -> str:
    """What of the figures a graph cannot say; nothing: `graph_of` makes one."""
    parts = {
        "latent attention without turned positions": arch.latent is not None and arch.positions,
    }
    return ", ".join(name for name, has in parts.items() if has)


def graph_of(arch: Arch, samples: int, dropout: float = 0.0, kinds: tuple[Kind, ...] = ()) -> Graph:
    """One forward pass of ``samples`` sequences to the mean cross-entropy, parameters in float32.

    dropout: behind the table, attention and the MLP, before what they read is added.
    kinds: of the layers; none: as the figures have them.

    Raises:
        NoGraph: see `unsaid`.
    """
    if missing := unsaid(arch):
        raise NoGraph(f"{arch.name}: no graph is made of {missing}")
    kinds = kinds or kinds_of(arch)
    g = Draft(dropout)
    tokens, targets = (g.given(name, samples, arch.seq, dtype="int64") for name in BATCH_DIMS)
    table = g.parameter("tokens.weight", arch.vocab, arch.hidden)
    wide = (samples, arch.seq, arch.hidden)
    x = g.op("embedding", "tokens", (tokens, table), wide, padding_idx=None)
    angles: Angles = ()
    if arch.positions:
        x = _learned(g, arch, x, wide)
    else:
        angles = _angles(g, arch)
    x = g.dropped("", x, wide)
    called: dict[Kind, list[str]] = {}
    for i, kind in enumerate(kinds):
        called.setdefault(kind, []).append(f"layers.{i}")
        names = {"block": kind.name, "instance": f"layers.{i}"}
        x = g.op("block", f"layers.{i}", (x, *angles), wide, **names)
    x = g.norm("norm", x, arch.gated)
    head = table if arch.tied else g.parameter("head.weight", arch.vocab, arch.hidden)
    logits = g.op("linear", "head", (x, head), (samples, arch.seq, arch.vocab))
    rows = samples * arch.seq
    logits = g.op("reshape", "", (logits,), (rows, arch.vocab), shape=(rows, arch.vocab))
    labels = g.op("reshape", "", (targets,), (rows,), "int64", shape=(rows,))
    loss = g.op(
        *("cross_entropy", "", (logits, labels), ()),
        **{"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"},
    )
    blocks = {
        kind.name: Block(kind.name, _layer(arch, samples, dropout, kind), tuple(instances))
        for kind, instances in called.items()
    }
    return g.graph(loss, blocks)


def _layer(arch: Arch, samples: int, dropout: float, kind: Kind) -> Graph:
    """One layer: attention, then the feed-forward part, each added to what it read."""
    g = Draft(dropout)
    wide = (samples, arch.seq, arch.hidden)
    x = g.given("x", *wide, dtype="float32", grad=True)
    angles: Angles = ()
    if not arch.positions:
        turned = arch.latent.rope_dim if arch.latent else arch.dim
        angles = tuple(g.given(n, 1, arch.seq, turned, dtype="float32") for n in ("cos", "sin"))
    normed = g.norm("attention_norm", x, arch.gated)
    y = attention(g, arch, normed, angles, samples, kind.windowed)
    x = g.op("add", "", (x, g.dropped("out", y, wide)), wide)
    normed = g.norm("mlp_norm", x, arch.gated)
    if arch.is_moe and not kind.dense:
        y = experts(g, arch, normed)
    else:
        y = mlp(g, arch, normed, arch.dense_ffn or arch.ffn if arch.is_moe else arch.ffn)
    y = g.dropped("down", y, wide)
    return g.graph(g.op("add", "", (x, y), wide), {})


def _learned(g: Draft, arch: Arch, x: str, shape: tuple[int, ...]) -> str:
    """``x`` and a learned row for every position."""
    places = g.op("arange", "", (), (arch.seq,), "int64", start=0, step=1, stop=arch.seq)
    table = g.parameter("positions.weight", arch.seq, arch.hidden)
    rows = g.op("embedding", "positions", (places, table), shape[1:], padding_idx=None)
    return g.op("add", "", (x, rows), shape)


def _angles(g: Draft, arch: Arch) -> tuple[str, str]:
    """Cosines and sines by which queries and keys turn."""
    turned = arch.latent.rope_dim if arch.latent else arch.dim
    half, shape = (1, arch.seq, turned // 2), (1, arch.seq, turned)
    x = g.op("arange", "angles", (), (arch.seq,), "int64", start=0, step=1, stop=arch.seq)
    x = g.op("reshape", "angles", (x,), (1, arch.seq, 1), "int64", shape=(1, arch.seq, 1))
    x = g.op("cast", "angles", (x,), (1, arch.seq, 1), dtype="float32")
    rates = g.add("angles.rates", half[2:], "buffer", "float32", False)
    x = g.op("mul", "angles", (x, rates), half)
    x = g.op("cat", "angles", (x, x), shape, dim=2)
    return g.op("cos", "angles", (x,), shape), g.op("sin", "angles", (x,), shape)
