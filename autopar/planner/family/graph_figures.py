"""What layers of a transformer do on one tensor-parallel rank, read off their graph.

The graph is lowered once for each tensor-parallel degree, microbatch and way of running it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import cast

from autopar.cost_models.collectives import Kind as Collective
from autopar.cost_models.family import Arch
from autopar.cost_models.layer_figures import (
    KEY_TILE,
    LayerFigures,
    LayerKept,
    Moved,
    Saved,
    mean,
    routed_traffic,
)
from autopar.cost_models.layer_products import Product
from autopar.cost_models.precision import stream_bytes
from autopar.cost_models.recompute import Traffic
from autopar.cost_models.software import Software
from autopar.lowering.precision import at_precision
from autopar.lowering.spread import Lowered, LoweredOp, LoweredTensor, lower
from autopar.nouns.axes import TENSOR
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.layout import Layout
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import key
from autopar.nouns.style import Style
from autopar.planner.family.graph.model import BATCH_DIMS, Kind, graph_of, kinds_of
from autopar.planner.family.megatron import NORMS, spread_of
from autopar.pricing.activations import Places
from autopar.rules.cut import batch_cut
from autopar.rules.fusion import ALONE, Fusion, fusion
from autopar.rules.resharding import collectives
from autopar.rules.work import Moves, Work, extents, kept_bytes, op_work

_DTYPES = {8: "float64", 4: "float32", 2: "bfloat16"}
_JOINED = ({"q", "k", "v"}, {"q_down", "kv_down"}, {"gate", "up"}, {"shared_gate", "shared_up"})
"""Products of one operand that software does as one."""
ALONE_BY_HAND = (*NORMS, "dropout")
"""What compilers join with its neighbours, and most of the kernels that are written do not."""
DROPOUT = 0.1
MLPS = ("mlp", "gate", "up", "shared", "shared_gate", "shared_up")
ROUTED = ("router", "experts", "routed")
"""Modules of what layers do with the tokens that they route (`layer_figures`)."""


@dataclass(frozen=True)
class ModelFigures:
    """Of an average layer; what one keeps of a microbatch for backward, with one MLP and with
    experts."""

    layer: LayerFigures
    kept: LayerKept


def figures_of(arch: Arch, layout: Layout, software: Software, precision: str) -> ModelFigures:
    """Of each kind of layer from its graph, and of an average one.

    Raises:
        NoGraph: figures that no graph says.
    """
    way = Way(
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        style=software.style,
        drops=software.dropout,
        whole_scores=software.attention == "unfused",
        element_bytes=stream_bytes(precision),
        samples=layout.microbatch,
    )
    return _averaged(arch, way, layout.cp, software.imbalance)


@lru_cache(maxsize=1024)
def _averaged(arch: Arch, way: Way, cp: int, imbalance: float) -> ModelFigures:
    counts = Counter(kinds_of(arch))
    kinds = _lowered(replace(arch, layers=len(counts)), way, tuple(counts))
    each = [(kinds[kind].over(cp), count / arch.layers) for kind, count in counts.items()]
    tokens = way.samples * arch.seq / cp
    routed = routed_traffic(arch, tokens, way.tp, way.style, way.element_bytes, imbalance)
    layer = mean(each).beside(*routed)
    saved = zip(counts, (one.saved for one, _ in each), strict=True)
    kept = {kind.dense or not arch.is_moe: one for kind, one in saved}
    return ModelFigures(layer, LayerKept(kept.get(True), kept.get(False)))


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
def _lowered(arch: Arch, way: Way, kinds: tuple[Kind, ...]) -> dict[Kind, LayerFigures]:
    run = replace(
        arch,
        causal=arch.causal and not way.whole_scores,
        kv_heads=max(arch.kv_heads, way.tp),  # ranks that share a head have it each
        window=arch.window + KEY_TILE,
    )
    drawn = tuple(replace(k, windowed=k.windowed and not way.whole_scores) for k in kinds)
    graph = at_precision(
        graph_of(run, way.samples, DROPOUT * way.drops, drawn), _DTYPES[way.element_bytes]
    )
    spread = spread_of(graph, Mesh((TENSOR,), (way.tp,)), way.sequence_parallel)
    top = lower(graph, spread, 1, batch_cut(graph, BATCH_DIMS))
    fused = fusion(graph) if way.style == "compiled" else ALONE
    (head,) = (_product(op, top) for op in top.ops if op.op.name == "head/linear")
    # Where each rank has tokens of its own, routed ones are moved to their experts alone.
    apart = way.sequence_parallel and not arch.shared_experts
    bodies = {kind: top.blocks[as_drawn.name] for kind, as_drawn in zip(kinds, drawn, strict=True)}
    return {
        kind: _figures(body, fused, head, apart and arch.is_moe and not kind.dense)
        for kind, body in bodies.items()
    }


def _figures(body: Lowered, fused: Fusion, head: Product, apart: bool) -> LayerFigures:
    """Of a layer, without what it does with routed tokens; ``apart``: nor what they move."""
    own = [op for op in body.ops if op.op.name.partition("/")[0] not in ROUTED]
    works = {op.op.name: _work(op, body, fused) for op in own}
    light = {n: w for n, w in works.items() if w.cost in ("elementwise", "reduction")}
    return LayerFigures(
        products=tuple(_products(own, body)),
        attention_flops=sum(w.forward_flops for w in works.values() if w.cost == "attention"),
        traffic=Traffic(
            hidden=sum(w.forward_bytes for n, w in light.items() if _part(n) == "hidden"),
            heads=sum(w.forward_bytes for n, w in light.items() if _part(n) == "heads"),
            activation=sum(w.forward_bytes for n, w in light.items() if _part(n) == "activation"),
        ),
        traffic_back=sum(w.backward_bytes for w in light.values()),
        moved=tuple(_moved(body, ("mlp_norm", *ROUTED) if apart else ())),
        parameters=_parameters(body),
        table=head.columns * head.depth,
        head=head,
        saved=_saved(own, body, fused),
    )


def _work(op: LoweredOp, body: Lowered, fused: Fusion) -> Work:
    assert op.bound is not None
    kernel = _kernel(op, fused, body.block)
    work = op_work(op.op, op.bound, op.strategy, body.mesh, body.graph.tensors, kernel)
    if work.kind == "bias" and kernel is None:
        # The product before it adds it; its gradient is a sum over rows.
        return replace(work, forward_bytes=0.0, backward_bytes=work.backward_bytes / 2)
    return work


def _kernel(op: LoweredOp, fused: Fusion, scope: str | None) -> Moves | None:
    """What the op moves in a kernel with others; None: it is one by itself."""
    return None if op.op.kind in ALONE_BY_HAND else fused.moves.get(key(scope, op.op.name))


def _part(name: str) -> str:
    """What of a layer an elementwise op belongs to."""
    module, _, kind = name.partition("/")
    if kind.startswith("rotary") or (module == "attention" and not kind.startswith("dropout")):
        return "heads"
    return "activation" if module in MLPS else "hidden"


def _product(op: LoweredOp, where: Lowered) -> Product:
    assert op.bound is not None
    local = extents(op.bound, op.strategy, where.mesh)
    columns, depth = local["n"], local["k"]
    return Product(math.prod(local.values()) / (columns * depth), columns, depth)


def _products(ops: Sequence[LoweredOp], body: Lowered) -> Iterator[Product]:
    made = {
        op.op.name.partition("/")[0]: _product(op, body) for op in ops if op.op.kind == "linear"
    }
    for joined in _JOINED:
        parts = [made.pop(name) for name in sorted(joined & made.keys())]
        if parts:
            yield replace(parts[0], columns=sum(p.columns for p in parts))
    yield from made.values()


def _moved(body: Lowered, without: tuple[str, ...]) -> Iterator[Moved]:
    """Forward collectives. without: modules whose results are not counted."""
    tensors = body.graph.tensors
    steps = [(value.steps, value.tensor) for value in body.tensors.values()]
    steps += [(o.steps, tensors[o.name]) for op in body.ops for o in op.operands]
    steps += [(o.steps, tensors[o.name]) for o in body.outputs]
    for way, tensor in steps:
        if tensor.name.partition("/")[0] not in without:
            for moved in collectives(way, tensor.dtype, body.mesh, "forward"):
                yield cast(Collective, moved.kind), float(moved.size_bytes), 1.0


def _saved(ops: Sequence[LoweredOp], body: Lowered, fused: Fusion) -> Saved:
    """By groups; of what is gathered for products, the piece that each rank makes."""
    places = Places(body)
    sizes: dict[str, float] = {}
    for op in ops:
        assert op.bound is not None
        kernel = _kernel(op, fused, body.block)
        rule = op.bound.rule
        read = rule.saves if kernel is None else kernel.saved
        made = rule.saves_results if kernel is None else kernel.saved_results
        names = [op.op.inputs[i] for i in read] + [op.op.outputs[i] for i in made]
        for root in (places.root[name] for name in names):
            value = body.tensors[root]
            if value.tensor.differentiable and value.tensor.role != "parameter":
                sizes[root] = _size(value, body)
        kept = sum(kept_bytes(op.bound, extents(op.bound, op.strategy, body.mesh)))
        sizes[f"{op.op.name} keeps"] = float(kept)
    groups = dict.fromkeys((f.name for f in fields(Saved)), 0.0)
    for name, size in sizes.items():
        groups[_group(name)] += size
    groups["every_second"] = _every_second(ops, body)
    return Saved(**groups)


def _every_second(ops: Sequence[LoweredOp], body: Lowered) -> float:
    """What torchtitan's selective checkpointing keeps: the layer's input, attention's result, and
    the results of the first, third, fifth ... of its products."""
    products = [op for op in ops if op.op.kind == "linear"]
    names = [op.op.outputs[0] for op in products[::2]]
    names += [op.op.outputs[0] for op in ops if op.op.kind == "attention"]
    size = _size(body.tensors["x"], body)
    for op in ops:
        if op.op.kind == "attention" and op.bound is not None:
            size += sum(kept_bytes(op.bound, extents(op.bound, op.strategy, body.mesh)))
    return size + sum(_size(body.tensors[name], body) for name in names)


def _size(value: LoweredTensor, body: Lowered) -> float:
    local = value.produced.local_shape(value.tensor.shape, body.mesh)
    return float(math.prod(local) * DTYPE_BYTES[value.tensor.dtype])


def _group(name: str) -> str:
    """The field of `Saved` that a tensor belongs to."""
    module, _, kind = name.partition("/")
    if module in ("attention_norm", "mlp_norm") and kind in NORMS:
        return "norms"
    if name == "attention/attention":
        return "mixed"
    if module in MLPS and kind in ("mul", "gelu"):
        return "after"
    if module in ("attention", "q", "k", "v", "kv"):
        return "heads"
    return "before" if module in MLPS else "inputs"


def _parameters(body: Lowered) -> float:
    return float(
        sum(
            math.prod(value.produced.local_shape(value.tensor.shape, body.mesh))
            for value in body.tensors.values()
            if value.tensor.role == "parameter"
            and value.tensor.name.partition(".")[0] not in ROUTED[1:]
        )
    )
