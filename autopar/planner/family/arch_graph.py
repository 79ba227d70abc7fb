"""A dense transformer's figures as the `Graph` that a frontend makes of its model: the inverse of
`autopar.planner.family.architecture`.

A gated model has the form of Llama (RMSNorm, SiLU, no biases), a plain one that of GPT (LayerNorm,
GELU, biases); positions are learned rows of a table, or turn queries and keys. Nothing is captured:
the layer stands once, as a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopar.cost_models.family import Arch
from autopar.nouns.errors import UserError
from autopar.nouns.graph import Block, Graph, Op, Role, Tensor

LAYER = "Layer"
BATCH_DIMS = {"tokens": 0, "targets": 0}
"""Of the graph's inputs."""


class NoGraph(UserError):
    """Figures that no graph says yet; the text names them."""


def unsaid(arch: Arch) -> str:
    """What of the figures a graph cannot say; nothing: `graph_of` makes one."""
    parts = {
        "experts": arch.is_moe,
        "latent attention": arch.latent is not None,
        "windows of attention": arch.windowed_layers > 0 and arch.window < arch.seq,
    }
    return ", ".join(name for name, has in parts.items() if has)


def graph_of(arch: Arch, samples: int, dropout: float = 0.0) -> Graph:
    """One forward pass of ``samples`` sequences to the mean cross-entropy, parameters in float32.

    dropout: behind the table, attention and the MLP, before what they read is added.

    Raises:
        NoGraph: experts, latent or windowed attention.
    """
    if missing := unsaid(arch):
        raise NoGraph(f"{arch.name}: no graph is made of {missing}")
    body = _layer(arch, samples, dropout)
    g = _Draft(dropout)
    tokens, targets = (g.given(name, samples, arch.seq, dtype="int64") for name in BATCH_DIMS)
    table = g.parameter("tokens.weight", arch.vocab, arch.hidden)
    wide = (samples, arch.seq, arch.hidden)
    x = g.op("embedding", "tokens", (tokens, table), wide, padding_idx=None)
    angles: tuple[str, ...] = ()
    if arch.positions:
        x = _learned(g, arch, x, wide)
    else:
        angles = _angles(g, arch)
    x = g.dropped("", x, wide)
    instances = tuple(f"layers.{i}" for i in range(arch.layers))
    for instance in instances:
        x = g.op("block", instance, (x, *angles), wide, block=LAYER, instance=instance)
    x = _norm(g, arch, "norm", x, wide)
    head = table if arch.tied else g.parameter("head.weight", arch.vocab, arch.hidden)
    logits = g.op("linear", "head", (x, head), (samples, arch.seq, arch.vocab))
    rows = samples * arch.seq
    logits = g.op("reshape", "", (logits,), (rows, arch.vocab), shape=(rows, arch.vocab))
    labels = g.op("reshape", "", (targets,), (rows,), "int64", shape=(rows,))
    loss = g.op(
        *("cross_entropy", "", (logits, labels), ()),
        **{"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"},
    )
    return g.graph(loss, {LAYER: Block(LAYER, body, instances)})


def _layer(arch: Arch, samples: int, dropout: float) -> Graph:
    """One layer: attention, then the feed-forward part, each added to what it read."""
    g = _Draft(dropout)
    wide = (samples, arch.seq, arch.hidden)
    x = g.given("x", *wide, dtype="float32", grad=True)
    angles: list[str] = []
    if not arch.positions:
        angles = [g.given(name, 1, arch.seq, arch.dim, dtype="float32") for name in ("cos", "sin")]
    normed = _norm(g, arch, "attention_norm", x, wide)
    heads = {"q": arch.heads, "k": arch.kv_heads, "v": arch.kv_heads}
    apart = []
    for name, count in heads.items():
        y = _product(g, arch, name, normed, count * arch.dim)
        shape = (samples, arch.seq, count, arch.dim)
        y = g.op("reshape", "attention", (y,), shape, shape=shape)
        shape = (samples, count, arch.seq, arch.dim)
        apart.append(g.op("transpose", "attention", (y,), shape, dims=(0, 2, 1, 3)))
    for i, count in enumerate((arch.heads, arch.kv_heads)) if angles else ():
        shape = (samples, count, arch.seq, arch.dim)
        apart[i] = g.op("rotary", "attention", (apart[i], *angles), shape, style="half")
    shape = (samples, arch.heads, arch.seq, arch.dim)
    mixed = g.op(
        *("attention", "attention", tuple(apart), shape),
        **{"causal": arch.causal, "dropout_p": dropout, "scale": None},
    )
    shape = (samples, arch.seq, arch.heads, arch.dim)
    y = g.op("transpose", "attention", (mixed,), shape, dims=(0, 2, 1, 3))
    joined = (samples, arch.seq, arch.heads * arch.dim)
    y = g.op("reshape", "attention", (y,), joined, shape=joined)
    y = g.dropped("out", _product(g, arch, "out", y, arch.hidden), wide)
    x = g.op("add", "", (x, y), wide)
    normed = _norm(g, arch, "mlp_norm", x, wide)
    between = (samples, arch.seq, arch.ffn)
    if arch.gated:
        gate = g.op("silu", "mlp", (_product(g, arch, "gate", normed, arch.ffn),), between)
        y = g.op("mul", "mlp", (gate, _product(g, arch, "up", normed, arch.ffn)), between)
    else:
        up = _product(g, arch, "up", normed, arch.ffn)
        y = g.op("gelu", "mlp", (up,), between, approximate="none")
    y = g.dropped("down", _product(g, arch, "down", y, arch.hidden), wide)
    return g.graph(g.op("add", "", (x, y), wide), {})


def _norm(g: _Draft, arch: Arch, name: str, x: str, shape: tuple[int, ...]) -> str:
    weight = g.parameter(f"{name}.weight", arch.hidden)
    if arch.gated:
        how = {"eps": 1e-6, "scale_offset": 0, "upcast": True}
        return g.op("rms_norm", name, (x, weight), shape, **how)
    bias = g.parameter(f"{name}.bias", arch.hidden)
    return g.op("layer_norm", name, (x, weight, bias), shape, dims=1, eps=1e-5)


def _product(g: _Draft, arch: Arch, name: str, x: str, outputs: int) -> str:
    """``x`` times the weight called ``name``, with a bias where the model has them."""
    *rows, inputs = g.tensors[x].shape
    y = g.op("linear", name, (x, g.parameter(f"{name}.weight", outputs, inputs)), (*rows, outputs))
    if not arch.has_biases:
        return y
    bias = g.parameter(f"{name}.bias", outputs)
    return g.op("add", name, (y, bias), (*rows, outputs), bias=True)


def _learned(g: _Draft, arch: Arch, x: str, shape: tuple[int, ...]) -> str:
    """``x`` and a learned row for every position."""
    places = g.op("arange", "", (), (arch.seq,), "int64", start=0, step=1, stop=arch.seq)
    table = g.parameter("positions.weight", arch.seq, arch.hidden)
    rows = g.op("embedding", "positions", (places, table), shape[1:], padding_idx=None)
    return g.op("add", "", (x, rows), shape)


def _angles(g: _Draft, arch: Arch) -> tuple[str, str]:
    """Cosines and sines by which queries and keys turn."""
    half, shape = (1, arch.seq, arch.dim // 2), (1, arch.seq, arch.dim)
    x = g.op("arange", "angles", (), (arch.seq,), "int64", start=0, step=1, stop=arch.seq)
    x = g.op("reshape", "angles", (x,), (1, arch.seq, 1), "int64", shape=(1, arch.seq, 1))
    x = g.op("cast", "angles", (x,), (1, arch.seq, 1), dtype="float32")
    rates = g.add("angles.rates", half[2:], "buffer", "float32", False)
    x = g.op("mul", "angles", (x, rates), half)
    x = g.op("cat", "angles", (x, x), shape, dim=2)
    return g.op("cos", "angles", (x,), shape), g.op("sin", "angles", (x,), shape)


@dataclass(slots=True)
class _Draft:
    """A graph under construction; every method returns the name of the tensor that it adds."""

    dropout: float
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)

    def add(self, name: str, shape: tuple[int, ...], role: Role, dtype: str, grad: bool) -> str:
        self.tensors[name] = Tensor(name, shape, dtype, role, grad)
        return name

    def parameter(self, name: str, *shape: int) -> str:
        return self.add(name, shape, "parameter", "float32", True)

    def given(self, name: str, *shape: int, dtype: str, grad: bool = False) -> str:
        self.inputs.append(name)
        return self.add(name, shape, "input", dtype, grad)

    def op(
        self,
        kind: str,
        module: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        result: str = "float32",
        /,
        **attrs: Any,
    ) -> str:
        """``result``: its dtype."""
        stem = name = f"{module}/{kind}" if module else kind
        count = 0
        while name in self.tensors:
            count += 1
            name = f"{stem}_{count}"
        attrs |= {"dtype": result} if kind in ("arange", "cast") else {}
        self.ops.append(Op(kind, inputs, (name,), attrs))
        grad = any(self.tensors[n].differentiable for n in inputs)
        return self.add(name, shape, "activation", result, grad)

    def dropped(self, module: str, x: str, shape: tuple[int, ...]) -> str:
        """``x`` behind dropout, where there is any."""
        return self.op("dropout", module, (x,), shape, p=self.dropout) if self.dropout else x

    def graph(self, output: str, blocks: dict[str, Block]) -> Graph:
        last = self.tensors[output]
        self.add(output, last.shape, "output", last.dtype, last.differentiable)
        return Graph(self.tensors, tuple(self.ops), tuple(self.inputs), (output,), blocks)
