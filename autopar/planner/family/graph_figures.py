"""What one layer of a dense transformer does on one tensor-parallel rank, read off its graph.

The graph is lowered once for each tensor-parallel degree, microbatch and way of running it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import cast

from autopar.cost_models.collectives import Kind
from autopar.cost_models.family import Arch
from autopar.cost_models.layer_figures import LayerFigures, Saved, by_formulas
from autopar.cost_models.layer_products import Product
from autopar.cost_models.precision import stream_bytes
from autopar.cost_models.recompute import Traffic
from autopar.cost_models.software import Software
from autopar.lowering.precision import at_precision
from autopar.lowering.spread import Lowered, LoweredOp, lower
from autopar.nouns.axes import CONTEXT, TENSOR
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.layout import Layout
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.nouns.style import Style
from autopar.planner.family.graph.model import BATCH_DIMS, LAYER, graph_of, kinds_of
from autopar.planner.family.megatron import NORMS, spread_of
from autopar.pricing.activations import Places
from autopar.rules.cut import batch_cut
from autopar.rules.fusion import ALONE, Fusion, fusion
from autopar.rules.resharding import collectives
from autopar.rules.work import Moves, Work, extents, kept_bytes, op_work

_DTYPES = {8: "float64", 4: "float32", 2: "bfloat16"}
_JOINED = ({"q", "k", "v"}, {"gate", "up"})
"""Products of one operand that software does as one."""
ALONE_BY_HAND = (*NORMS, "dropout")
"""What compilers join with its neighbours, and most of the kernels that are written do not."""
DROPOUT = 0.1
FEW_LAYERS = 2
"""Of the graph that is lowered: a layer is the same whatever their number."""


def figures_of(arch: Arch, layout: Layout, software: Software, precision: str) -> LayerFigures:
    """From the graph, where it says all of the model and layout; else by the formulas."""
    if no_graph(arch, layout):
        return by_formulas(arch, layout, software, stream_bytes(precision))
    way = Way(
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        style=software.style,
        drops=software.dropout,
        whole_scores=software.attention == "unfused",
        element_bytes=stream_bytes(precision),
        samples=layout.microbatch,
    )
    return _lowered(replace(arch, layers=FEW_LAYERS), way)


def no_graph(arch: Arch, layout: Layout) -> str:
    """What of a model and layout is priced by formulas yet; nothing: it is from its graph."""
    parts = {
        "experts": arch.is_moe,
        "latent attention": arch.latent is not None,
        "windows of attention": any(kind.windowed for kind in kinds_of(arch)),
        CONTEXT: layout.cp > 1,
    }
    return ", ".join(name for name, has in parts.items() if has)


@dataclass(frozen=True)
class Way:
    """How a layer is run on ``samples`` sequences. whole_scores: what the mask hides of attention
    is computed too."""

    tp: int
    sequence_parallel: bool
    style: Style
    drops: bool
    whole_scores: bool
    element_bytes: int
    samples: int


@lru_cache(maxsize=1024)
def _lowered(arch: Arch, way: Way) -> LayerFigures:
    run = replace(
        arch,
        causal=arch.causal and not way.whole_scores,
        kv_heads=max(arch.kv_heads, way.tp),  # ranks that share a head have it each
    )
    graph = at_precision(
        graph_of(run, way.samples, DROPOUT * way.drops), _DTYPES[way.element_bytes]
    )
    spread = spread_of(graph, Mesh((TENSOR,), (way.tp,)), way.sequence_parallel)
    top = lower(graph, spread, 1, batch_cut(graph, BATCH_DIMS))
    fused = fusion(graph) if way.style == "compiled" else ALONE
    body = top.blocks[LAYER]
    works = {op.op.name: _work(op, body, fused) for op in body.ops}
    light = {n: w for n, w in works.items() if w.cost in ("elementwise", "reduction")}
    (head,) = (_product(op, top) for op in top.ops if op.op.name == "head/linear")
    return LayerFigures(
        products=tuple(_products(body)),
        attention_flops=sum(w.forward_flops for w in works.values() if w.cost == "attention"),
        traffic=Traffic(
            hidden=sum(w.forward_bytes for n, w in light.items() if _part(n) == "hidden"),
            heads=sum(w.forward_bytes for n, w in light.items() if _part(n) == "heads"),
            activation=sum(w.forward_bytes for n, w in light.items() if _part(n) == "activation"),
        ),
        traffic_back=sum(w.backward_bytes for w in light.values()),
        moved=tuple(_moved(body)),
        parameters=_parameters(body),
        table=head.columns * head.depth,
        head=head,
        saved=_saved(body, fused),
    )


def _work(op: LoweredOp, body: Lowered, fused: Fusion) -> Work:
    assert op.bound is not None
    kernel = _kernel(op, fused)
    work = op_work(op.op, op.bound, op.strategy, body.mesh, body.graph.tensors, kernel)
    if work.kind == "bias" and kernel is None:
        # The product before it adds it; its gradient is a sum over rows.
        return replace(work, forward_bytes=0.0, backward_bytes=work.backward_bytes / 2)
    return work


def _kernel(op: LoweredOp, fused: Fusion) -> Moves | None:
    """What the op moves in a kernel with others; None: it is one by itself."""
    return None if op.op.kind in ALONE_BY_HAND else fused.moves.get(key(LAYER, op.op.name))


def _part(name: str) -> str:
    """What of a layer an elementwise op belongs to."""
    module, _, kind = name.partition("/")
    if kind.startswith("rotary"):
        return "heads"
    return "activation" if module in ("mlp", "gate", "up") else "hidden"


def _product(op: LoweredOp, where: Lowered) -> Product:
    assert op.bound is not None
    local = extents(op.bound, op.strategy, where.mesh)
    columns, depth = local["n"], local["k"]
    return Product(math.prod(local.values()) / (columns * depth), columns, depth)


def _products(body: Lowered) -> Iterator[Product]:
    made = {
        op.op.name.partition("/")[0]: _product(op, body)
        for op in body.ops
        if op.op.kind == "linear"
    }
    for joined in _JOINED:
        parts = [made.pop(name) for name in sorted(joined & made.keys())]
        if parts:
            yield replace(parts[0], columns=sum(p.columns for p in parts))
    yield from made.values()


def _moved(body: Lowered) -> Iterator[tuple[Kind, float]]:
    """Forward collectives, each with the bytes of its full-size side."""
    tensors = body.graph.tensors
    steps = [(value.steps, value.tensor) for value in body.tensors.values()]
    steps += [(o.steps, tensors[o.name]) for op in body.ops for o in op.operands]
    steps += [(o.steps, tensors[o.name]) for o in body.outputs]
    for way, tensor in steps:
        for moved in collectives(way, tensor.dtype, body.mesh, "forward"):
            yield cast(Kind, moved.kind), float(moved.size_bytes)


def _saved(body: Lowered, fused: Fusion) -> Saved:
    """By groups; of what is gathered for products, the piece that each rank makes."""
    places = Places(body)
    sizes: dict[str, float] = {}
    for op in body.ops:
        assert op.bound is not None
        kernel = _kernel(op, fused)
        rule = op.bound.rule
        read = rule.saves if kernel is None else kernel.saved
        made = rule.saves_results if kernel is None else kernel.saved_results
        names = [op.op.inputs[i] for i in read] + [op.op.outputs[i] for i in made]
        for root in (places.root[name] for name in names):
            value = body.tensors[root]
            if value.tensor.differentiable and value.tensor.role != "parameter":
                local = value.produced.local_shape(value.tensor.shape, body.mesh)
                sizes[root] = math.prod(local) * DTYPE_BYTES[value.tensor.dtype]
        kept = sum(kept_bytes(op.bound, extents(op.bound, op.strategy, body.mesh)))
        sizes[f"{op.op.name} keeps"] = float(kept)
    groups = dict.fromkeys((f.name for f in fields(Saved)), 0.0)
    for name, size in sizes.items():
        groups[_group(name)] += size
    return Saved(**groups)


def _group(name: str) -> str:
    """The field of `Saved` that a tensor belongs to."""
    module, _, kind = name.partition("/")
    if kind in NORMS:
        return "norms"
    if name in ("attention/attention", "mlp/mul", "mlp/gelu"):
        return "mixed" if module == "attention" else "after"
    if module in ("attention", "q", "k", "v"):
        return "heads"
    return "before" if module in ("mlp", "gate", "up") else "inputs"


def _parameters(body: Lowered) -> float:
    return float(
        sum(
            math.prod(value.produced.local_shape(value.tensor.shape, body.mesh))
            for value in body.tensors.values()
            if value.tensor.role == "parameter"
        )
    )
