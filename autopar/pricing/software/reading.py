"""Figures of a unit read off its lowered graph; names of ops are those of
`autopar.frontends.family`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import cast

from autopar.cost_models.collectives import Kind as Collective
from autopar.lowering.issued import internal_collectives
from autopar.lowering.lowered import Lowered, LoweredOp, LoweredTensor
from autopar.nouns.axes import OPS, SEQUENCES
from autopar.nouns.graph import DTYPE_BYTES
from autopar.nouns.plan import key
from autopar.pricing.software.figures import (
    DENSE,
    SHARED,
    Attention,
    Experts,
    Figures,
    Moved,
    Product,
    Saved,
    Traffic,
)
from autopar.pricing.units.places import Places
from autopar.rules.extents import extents
from autopar.rules.fusion import Fusion
from autopar.rules.held_bytes import kept_bytes
from autopar.rules.moved_bytes import Moves
from autopar.rules.resharding import SHIFT, collectives
from autopar.rules.work import Work, op_work

NORMS = ("layer_norm", "rms_norm")
ALONE_BY_HAND = (*NORMS, "dropout")
"""What compilers join with its neighbours, and most of the kernels that are written do not."""
ROUTED = ("router", "experts", "routed")
MLPS = (*DENSE[:3], *SHARED[:3])
_JOINED = (("q", "k", "v"), ("q_down", "kv_down"), ("gate", "up"), ("shared_gate", "shared_up"))
"""Products of one operand that software does as one."""


def figures_of(body: Lowered, fused: Fusion, apart: bool) -> Figures:
    """Of a layer. apart: each rank has tokens of its own, so that what experts alone read is not
    gathered for them.
    """
    own = [op for op in body.ops if _module(op.op.name) not in ROUTED]
    works = {op.op.name: _work(op, body, fused) for op in own}
    light = {n: w for n, w in works.items() if w.cost in ("elementwise", "reduction")}
    experts = next((_experts(op, body) for op in body.ops if op.op.kind == "experts"), None)
    attentions = [_attention(op, body, works) for op in own if op.op.kind == "attention"]
    beside = any(_module(op.op.name) in SHARED for op in own)
    alone = apart and experts is not None and not beside
    samples, positions, hidden = body.tensors["x"].tensor.shape
    return Figures(
        tokens=samples * positions / body.mesh.ways(SEQUENCES),
        hidden=hidden,
        parameters=float(sum(_outside_experts(body))),
        products=tuple(_products(own, body)),
        attention=next(iter(attentions), None),
        traffic=Traffic(
            **{
                part: sum(w.forward_bytes for n, w in light.items() if _part(n) == part)
                for part in ("hidden", "heads", "activation")
            }
        ),
        traffic_back=sum(w.backward_bytes for w in light.values()),
        moved=tuple(_passed(body, OPS, "forward", ("mlp_norm", *ROUTED) if alone else ())),
        experts=experts,
        saved=_saved(own, body, fused),
    )


def ends_of(root: Lowered) -> Figures:
    """Of what lies outside the layers: the head's product, where it is here, and all parameters.

    Of a stage's root as of the whole model's; what little else it does is not counted."""
    heads = [_product(op, root) for op in root.ops if op.op.name == "head/linear"]
    stream = next(
        op.op.inputs[0] if op.op.kind == "linear" else op.op.outputs[0]
        for op in root.ops
        if op.bound is None or op.op.name in ("tokens/embedding", "head/linear")
    )
    samples, positions, hidden = root.tensors[stream].tensor.shape
    sizes = [*_outside_experts(root)]
    return Figures(
        samples * positions / root.mesh.ways(SEQUENCES),
        hidden,
        float(sum(sizes)),
        head=next(iter(heads), None),
        largest=max(sizes, default=0),
    )


def _module(name: str) -> str:
    return name.partition("/")[0]


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


def _attention(op: LoweredOp, body: Lowered, works: dict[str, Work]) -> Attention:
    assert op.bound is not None
    local = extents(op.bound, op.strategy, body.mesh)
    query = math.prod(local[f] for dim in op.bound.operands[0] for f in dim)
    inside = [*internal_collectives(op, body.mesh)]
    shifts = [i for i in inside if i.collective.kind == SHIFT and i.direction == "forward"]
    hops = sum(shift.times for shift in shifts)
    made = body.tensors[op.op.outputs[0]]
    return Attention(
        flops=works[op.op.name].forward_flops,
        keys=min(local["t"], op.op.attrs.get("window") or local["t"]),
        rows=query / local["d"] * (1 + hops),
        scores=query / local["d"] * op.bound.factors["t"].size,
        result_bytes=_size(made, body),
        hops=hops,
        hop_bytes=max((float(shift.collective.size_bytes) for shift in shifts), default=0.0),
        moved=tuple(_passed(body, SEQUENCES, "forward")),
        moved_back=tuple(_passed(body, SEQUENCES, "backward")),
    )


def _experts(op: LoweredOp, body: Lowered) -> Experts:
    index, first, second = (body.graph.tensors[op.op.inputs[i]].shape for i in (1, 3, 4))
    count, hidden, width = second
    # Vectors stand behind experts' products where they stand behind those of attention.
    biased = any(other.op.name == "out/add" for other in body.ops)
    return Experts(count, index[-1], hidden, width, gated=first[1] > width, biased=biased)


def _product(op: LoweredOp, where: Lowered) -> Product:
    assert op.bound is not None
    local = extents(op.bound, op.strategy, where.mesh)
    columns, depth = local["n"], local["k"]
    rows = math.prod(local.values()) / (columns * depth)
    return Product(_module(op.op.name), rows, columns, depth)


def _products(ops: Sequence[LoweredOp], body: Lowered) -> Iterator[Product]:
    made = {_module(op.op.name): _product(op, body) for op in ops if op.op.kind == "linear"}
    for joined in _JOINED:
        parts = [made.pop(name) for name in joined if name in made]
        if parts:
            yield replace(parts[0], columns=sum(p.columns for p in parts))
    yield from made.values()


def _passed(
    body: Lowered, axes: tuple[str, ...], way: str, without: tuple[str, ...] = ()
) -> Iterator[Moved]:
    """Collectives over one of the axes between ops. without: modules whose results are not
    counted."""
    tensors = body.graph.tensors
    steps = [(value.steps, value.tensor) for value in body.tensors.values()]
    steps += [(o.steps, tensors[o.name]) for op in body.ops for o in op.operands]
    steps += [(o.steps, tensors[o.name]) for o in body.outputs]
    for taken, tensor in steps:
        if _module(tensor.name) not in without:
            for moved in collectives(taken, tensor.dtype, body.mesh, way):
                # Where ranks trade rows for heads, cp cuts these before tp does, so that tp's
                # ranks would trade too. Software cuts the heads of each of them by cp.
                nested = moved.kind == "all_to_all" and moved.axis in OPS
                if moved.axis in axes and not nested:
                    yield cast(Collective, moved.kind), float(moved.size_bytes)


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
        sizes[f"{op.op.name} keeps"] = _kept(op, body)
    groups = dict.fromkeys((f.name for f in fields(Saved)), 0.0)
    for name, size in sizes.items():
        groups[_group(name)] += size
    groups["every_second"] = _every_second(ops, body)
    return Saved(**groups)


def _kept(op: LoweredOp, body: Lowered) -> float:
    assert op.bound is not None
    return float(sum(kept_bytes(op.bound, op.strategy, body.mesh)))


def _every_second(ops: Sequence[LoweredOp], body: Lowered) -> float:
    """What torchtitan's selective checkpointing keeps: the layer's input, attention's result, and
    the results of the first, third, fifth ... of its products."""
    products = [op for op in ops if op.op.kind == "linear"]
    attentions = [op for op in ops if op.op.kind == "attention"]
    kept = [op.op.outputs[0] for op in (*products[::2], *attentions)]
    size = sum(_size(body.tensors[name], body) for name in ("x", *kept))
    return size + sum(_kept(op, body) for op in attentions)


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


def _outside_experts(body: Lowered) -> Iterator[int]:
    """Elements on one model rank of each parameter outside routed experts."""
    for value in body.tensors.values():
        module = value.tensor.name.partition(".")[0]
        if value.tensor.role == "parameter" and module not in ROUTED[1:]:
            yield math.prod(value.produced.local_shape(value.tensor.shape, body.mesh))
