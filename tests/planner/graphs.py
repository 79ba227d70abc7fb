"""Graphs written by hand: what a frontend makes of a small GPT."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopar.nouns.graph import Block, Graph, Op, Role, Source, Tensor


@dataclass
class Drawing:
    """A graph under construction; every method returns the name of the tensor it adds."""

    dtype: str = "float32"
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)

    def add(self, name: str, shape: tuple[int, ...], role: Role, dtype: str, grad: bool) -> str:
        self.tensors[name] = Tensor(name, shape, dtype, role, grad)
        return name

    def parameter(self, name: str, *shape: int) -> str:
        return self.add(name, shape, "parameter", self.dtype, True)

    def given(self, name: str, *shape: int, dtype: str = "int64", grad: bool = False) -> str:
        self.inputs.append(name)
        return self.add(name, shape, "input", dtype, grad)

    def op(self, kind: str, name: str, *inputs: str, shape: tuple[int, ...], **attrs: Any) -> str:
        grad = any(self.tensors[n].differentiable for n in inputs)
        dtype = attrs.pop("dtype", None) or self.dtype
        self.ops.append(Op(kind, inputs, (name,), attrs, Source(name.rpartition("/")[0])))
        return self.add(name, shape, "activation", dtype, grad)

    def graph(self, *outputs: str, blocks: dict[str, Block] | None = None) -> Graph:
        return Graph(self.tensors, tuple(self.ops), tuple(self.inputs), outputs, dict(blocks or {}))


def block_body(b: int, s: int, d: int, heads: int, ffn: int) -> Graph:
    """A pre-norm transformer block."""
    g = Drawing()
    x = g.given("x", b, s, d, dtype="float32", grad=True)
    norm = g.op(
        "layer_norm",
        "ln_1/layer_norm",
        x,
        g.parameter("ln_1.weight", d),
        g.parameter("ln_1.bias", d),
        shape=(b, s, d),
        dims=1,
        eps=1e-5,
    )
    split = []
    for name in ("q", "k", "v"):
        flat = g.op(
            "linear", f"{name}/linear", norm, g.parameter(f"{name}.weight", d, d), shape=(b, s, d)
        )
        shape = (b, s, heads, d // heads)
        seen = g.op("reshape", f"{name}/reshape", flat, shape=shape)
        shape = (b, heads, s, d // heads)
        split.append(g.op("transpose", f"{name}/transpose", seen, shape=shape, dims=(0, 2, 1, 3)))
    attended = g.op(
        "attention",
        "attention",
        *split,
        shape=(b, heads, s, d // heads),
        causal=True,
        scale=None,
        dropout_p=0.0,
    )
    back = g.op(
        "transpose", "merge/transpose", attended, shape=(b, s, heads, d // heads), dims=(0, 2, 1, 3)
    )
    merged = g.op("reshape", "merge/reshape", back, shape=(b, s, d))
    out = g.op("linear", "o/linear", merged, g.parameter("o.weight", d, d), shape=(b, s, d))
    x = g.op("add", "attn/add", x, out, shape=(b, s, d))
    norm = g.op(
        "layer_norm",
        "ln_2/layer_norm",
        x,
        g.parameter("ln_2.weight", d),
        g.parameter("ln_2.bias", d),
        shape=(b, s, d),
        dims=1,
        eps=1e-5,
    )
    up = g.op("linear", "up/linear", norm, g.parameter("up.weight", ffn, d), shape=(b, s, ffn))
    active = g.op("gelu", "gelu", up, shape=(b, s, ffn))
    down = g.op(
        "linear", "down/linear", active, g.parameter("down.weight", d, ffn), shape=(b, s, d)
    )
    out = g.op("add", "mlp/add", x, down, shape=(b, s, d))
    return g.graph(out)


def gpt(
    layers: int = 2,
    b: int = 8,
    s: int = 16,
    d: int = 32,
    heads: int = 4,
    ffn: int = 128,
    vocab: int = 64,
) -> Graph:
    """Embedding, ``layers`` equal blocks, norm, head and cross-entropy."""
    g = Drawing()
    ids = g.given("ids", b, s)
    labels = g.given("labels", b, s)
    x = g.op(
        "embedding", "embed/embedding", ids, g.parameter("embed.weight", vocab, d), shape=(b, s, d)
    )
    body = block_body(b, s, d, heads, ffn)
    for i in range(layers):
        attrs = {"block": "layers.*", "instance": f"layers.{i}"}
        g.ops.append(Op("block", (x,), (f"layers.{i}/out",), attrs, Source(f"layers.{i}")))
        x = g.add(f"layers.{i}/out", (b, s, d), "activation", "float32", True)
    x = g.op(
        "layer_norm",
        "norm/layer_norm",
        x,
        g.parameter("norm.weight", d),
        g.parameter("norm.bias", d),
        shape=(b, s, d),
        dims=1,
        eps=1e-5,
    )
    logits = g.op(
        "linear", "head/linear", x, g.parameter("head.weight", vocab, d), shape=(b, s, vocab)
    )
    flat = g.op("reshape", "logits/reshape", logits, shape=(b * s, vocab))
    wanted = g.op("reshape", "labels/reshape", labels, shape=(b * s,), dtype="int64")
    loss = g.op(
        "cross_entropy",
        "loss",
        flat,
        wanted,
        shape=(),
        ignore_index=-100,
        reduction="mean",
        label_smoothing=0.0,
    )
    blocks = {"layers.*": Block("layers.*", body, tuple(f"layers.{i}" for i in range(layers)))}
    return g.graph(loss, blocks=blocks)


def unfolded(graph: Graph) -> Graph:
    """The same graph with every block call written out."""
    ops: list[Op] = []
    tensors = dict(graph.tensors)
    for op in graph.ops:
        if op.kind != "block":
            ops.append(op)
            continue
        block = graph.blocks[op.attrs["block"]]
        instance = op.attrs["instance"]
        names = dict(zip(block.body.inputs, op.inputs, strict=True))
        names |= dict(zip(block.body.outputs, op.outputs, strict=True))
        for tensor in block.body.tensors.values():
            if tensor.name not in names:
                separator = "." if tensor.role == "parameter" else "/"
                names[tensor.name] = f"{instance}{separator}{tensor.name}"
                new = names[tensor.name]
                tensors[new] = Tensor(
                    new, tensor.shape, tensor.dtype, tensor.role, tensor.differentiable
                )
        for inner in block.body.ops:
            ops.append(
                Op(
                    inner.kind,
                    tuple(names[n] for n in inner.inputs),
                    tuple(names[n] for n in inner.outputs),
                    inner.attrs,
                    inner.source,
                )
            )
    return Graph(tensors, tuple(ops), graph.inputs, graph.outputs, {})
