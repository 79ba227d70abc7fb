"""What each aten op becomes: the table that `lift` looks ops up in.

A function gets a `Call`. Elementwise ops, reductions, products, losses, noise and shapes stand in
files of their own, the rest here. An op that stands nowhere keeps its aten name as its kind, for
the planner to name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.aten_bags import check_gradients, embedding_bag
from autopar.frontends.pytorch.aten_call import Call, Lift, Unliftable, torch_call
from autopar.frontends.pytorch.aten_complex import lift_complex, meets_complex
from autopar.frontends.pytorch.aten_elementwise import ELEMENTWISE, REDUCTIONS, thin
from autopar.frontends.pytorch.aten_fourier import OF_REAL
from autopar.frontends.pytorch.aten_lookups import LOOKUPS
from autopar.frontends.pytorch.aten_losses import LOSSES
from autopar.frontends.pytorch.aten_noise import NOISE
from autopar.frontends.pytorch.aten_products import PRODUCTS
from autopar.frontends.pytorch.aten_shapes import SHAPES
from autopar.frontends.pytorch.decomposed import lift_parts, parts_of
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter
from autopar.frontends.pytorch.original_calls import bound, original_call
from autopar.nouns.graph import freeze
from autopar.rules.torch_calls import POINTWISE
from autopar.torch_private.ops import op_name, plain_name, returning, schema_of


def lift_call(lifter: Lifter, node: fx.Node) -> Any:
    """Emits what ``node`` becomes and returns its value, or values for several results."""
    packet = plain_name(node.target)  # the lifter gives in-place ops their effect
    call = Call(lifter, node, bound(lifter, node))
    if meets_complex(node):
        return lift_complex(call)
    lift = TABLE.get(packet) if node.target.namespace == "aten" else None  # type: ignore[union-attr]
    start = len(lifter.nodes)
    if lift is not None:
        try:
            result = lift(call)
        except Unliftable:
            del lifter.nodes[start:]
        else:
            if len(lifter.nodes) == start + 1:
                _keep_call(lifter, lifter.nodes[start], node)
            return result
    return _unknown(lifter, node)


def _keep_call(lifter: Lifter, made: ir.Node, node: fx.Node) -> None:
    call = original_call(lifter, node, made.inputs)
    if call is not None:
        made.attrs["torch"] = call


def _unknown(lifter: Lifter, node: fx.Node) -> Any:
    """An op without a kind: what PyTorch makes it of, where no rule is known for it as it is; else
    named after itself, to be ruled by the user or refused by the plan."""
    # A program writes into nothing: who walks the trace does the write.
    target: Any = returning(node.target) or node.target
    # What PyTorch makes of an op may divide by a size, which rows that a mask chooses have not.
    alone = not lifter.chosen.reach(node)
    nodes: list[fx.Node] = []  # as often as the call has them
    fx.node.map_arg((node.args, node.kwargs), nodes.append)
    operands = [lifter.read(n) for n in nodes]
    fakes: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    if alone and (graph := parts_of(target, *fakes)) is not None:
        result = lift_parts(lifter, graph, operands, lifter.lifted)
        if target is node.target or not isinstance(result, ir.Value):
            return result
        return lifter.as_dtype(result, ir.like(node.meta["val"]).dtype)  # of what is written into
    meta = node.meta.get("val")
    several = isinstance(meta, list | tuple)
    metas: list[Any] = list(meta) if isinstance(meta, list | tuple) else [meta]
    outputs = [ir.like(t) for t in metas if isinstance(t, torch.Tensor)]
    kind = f"{target.namespace}::{op_name(target)}"
    made = lifter.emit_many(kind, operands, outputs)
    op = lifter.nodes[-1]
    _keep_call(lifter, op, node)
    attrs, constant = op.attrs, _constant_results(target, node, len(made))
    op.flat = any(constant) and sum(constant) == sum(v.is_float for v in made)
    if not op.flat:
        made = [
            lifter.emit_like("detach", value) if always else value
            for value, always in zip(made, constant, strict=True)
        ]
    known = not schema_of(target).is_mutable and torch.Tag.pointwise in target.tags
    if known and torch.Tag.nondeterministic_seeded not in target.tags:
        attrs[POINTWISE] = True
    if several and len(made) == 1 and "torch" in attrs:
        attrs["torch"] = freeze({**attrs["torch"], "listed": True})
    return made if several else made[0] if made else None


def _constant_results(target: Any, node: fx.Node, count: int) -> list[bool]:
    """Which of an op's results are floating numbers that autograd takes for constants, as it does a
    permutation; it is asked on fake tensors."""

    def asked(v: Any) -> Any:
        if isinstance(v, fx.Node):
            v = v.meta["val"]
        if isinstance(v, list | tuple):
            return [asked(x) for x in v]
        if isinstance(v, torch.Tensor) and v.is_floating_point():
            return v.detach().requires_grad_()
        return v

    try:
        with torch.enable_grad():
            made = target(*asked(node.args), **{k: asked(v) for k, v in node.kwargs.items()})
    except Exception:  # it will be told where the op runs
        return [False] * count
    several = made if isinstance(made, list | tuple) else [made]  # or nothing, of checks
    results = [t for t in several if isinstance(t, torch.Tensor)]
    return [t.is_floating_point() and not t.requires_grad for t in results]


_AS_IT_IS = frozenset("alias detach contiguous to type_as view_as lift_fresh detach_".split())
"""Views of a whole tensor as it is, where they are views at all."""


def written_through(lifter: Lifter, view: fx.Node, base: Value, value: Value) -> Value | None:
    """``base`` with the part that ``view`` shows replaced by ``value``; None if that is unknown."""
    packet = op_name(view.target)
    arguments = bound(lifter, view)
    if packet in _AS_IT_IS:
        return value if value.shape == base.shape else None
    if packet in ("view", "reshape", "squeeze", "unsqueeze", "_unsafe_view", "flatten"):
        return lifter.emit("reshape", [value], base.shape, base.dtype, shape=base.shape)
    if packet in ("transpose", "t", "permute", "movedim", "swapaxes", "swapdims", "numpy_T", "mT"):
        return _turned_back(lifter, view, base, value)
    if packet == "diagonal" and base.shape == 2 * value.shape:
        return _diagonal_written(lifter, base, value)
    if packet not in ("slice", "select"):
        return None
    dim = arguments["dim"] % len(base.shape)
    size = base.shape[dim]
    if packet == "slice":
        start, stop, _ = slice(arguments["start"], arguments["end"]).indices(size)
        if arguments["step"] != 1:
            setting = [dim, start, stop, arguments["step"]]
            call = torch_call("aten.slice_scatter.default", "%0", "%1", *setting)
            return lifter.emit_like("aten::slice_scatter", base, value, torch=call)
    else:
        start = arguments["index"] % size
        stop = start + 1
    full = (*base.shape[:dim], stop - start, *base.shape[dim + 1 :])
    value = lifter.reshape(value, full)
    before, after = (
        [lifter.slice(base, dim, a, b)] if a != b else [] for a, b in ((0, start), (stop, size))
    )
    pieces = [*before, value, *after]
    if len(pieces) == 1:
        return value
    return lifter.emit("cat", pieces, base.shape, base.dtype, dim=dim)


def _diagonal_written(lifter: Lifter, base: Value, value: Value) -> Value:
    """A square matrix whose diagonal is ``value``."""
    below = lifter.emit_like("tril", lifter.full(base.shape, True, "bool"), diagonal=0)
    on = lifter.emit_like("triu", below, diagonal=0)
    return lifter.emit("where", [on, value, base], base.shape, base.dtype)


def _turned_back(lifter: Lifter, view: fx.Node, base: Value, value: Value) -> Value:
    """``value``, whose dims ``view`` has put in another order than those of ``base``."""
    places = range(len(base.shape))
    # Sizes that name their dims: what the view does to them is the order.
    named = torch.empty([i + 2 for i in places], device="meta")
    order = [n - 2 for n in view.target(named, *view.args[1:], **view.kwargs).shape]  # type: ignore[operator]
    return lifter.transpose(value, tuple(order.index(i) for i in places))


# -- attention, normalisation, vocabulary ----------------------------------------------------------


def _attention(call: Call) -> Value:
    q, k, v = call["query"], call["key"], call["value"]
    mask = [call["attn_mask"]] if call["attn_mask"] is not None else []
    shape = (*q.shape[:-1], v.shape[-1])
    reshape = call.lifter.reshape
    if len(q.shape) == 3:  # the kind has a dim of heads
        mask = [reshape(m, _with_heads(m.shape)) if m.shape[2:] else m for m in mask]
        q, k, v = (reshape(x, _with_heads(x.shape)) for x in (q, k, v))
    if len(q.shape) != 4:
        raise Unliftable
    mixed = call.lifter.emit(
        "attention", [q, k, v, *mask], (*q.shape[:-1], v.shape[-1]), q.dtype,
        causal=call["is_causal"], scale=call["scale"], dropout_p=float(call["dropout_p"]),
    )  # fmt: skip
    return reshape(mixed, shape)


def _with_heads(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``b s d`` -> ``b h s d`` with one head."""
    return (shape[0], 1, *shape[1:])


def _normalised(call: Call, kind: str, **attrs: Any) -> Value:
    """``kind`` of the input with its weight and bias, where there are such."""
    weight, bias = call["weight"], call["bias"]
    if weight is None and bias is not None:
        raise Unliftable
    operands = [v for v in (weight, bias) if v is not None]
    return call.lifter.emit_like(kind, call["input"], *operands, **attrs, eps=call["eps"])


def _layer_norm(call: Call) -> Value:
    return _normalised(call, "layer_norm", dims=len(call["normalized_shape"]))


def _rms_norm(call: Call) -> Value:
    x = call["input"]
    if len(call["normalized_shape"]) != 1:
        raise Unliftable
    # torch's own default depends on the dtype that it accumulates in
    exact = torch.float64 if x.dtype == "float64" else torch.float32
    eps = torch.finfo(exact).eps if call["eps"] is None else call["eps"]
    weight = [] if call["weight"] is None else [call["weight"]]
    return call.lifter.emit_like("rms_norm", x, *weight, eps=eps, upcast=True, scale_offset=0)


def _group_norm(call: Call) -> Value:
    return _normalised(call, "group_norm", groups=call["num_groups"])


def _instance_norm(call: Call) -> Value:
    """A group norm with a group for every channel."""
    if not call["use_input_stats"] or call["running_mean"] is not None:
        raise Unliftable
    return _normalised(call, "group_norm", groups=call["input"].shape[1])


def _batch_norm(call: Call) -> Value:
    x, weight, bias = (call[name] for name in ("input", "weight", "bias"))
    running = [v for name in ("running_mean", "running_var") if (v := call[name]) is not None]
    if len(running) == 1 or call["momentum"] is None:
        raise Unliftable
    both = [weight, bias] if weight is not None and bias is not None else []
    made = call.lifter.emit_like(
        "batch_norm", x, *both, *running,
        eps=call["eps"], momentum=call["momentum"], affine=bool(both), training=call["training"],
        updates_buffers=bool(call["training"] and running),
    )  # fmt: skip
    return made if both else _of_channels(call.lifter, made, weight, bias)


def _of_channels(lifter: Lifter, x: Value, weight: Value | None, bias: Value | None) -> Value:
    """``x`` times one, or plus the other, where only one is given, as for standardised weights."""
    for kind, given in (("mul", weight), ("add", bias)):
        if given is not None:
            spread = (given.shape[0], *(1 for _ in x.shape[2:]))
            x = lifter.emit_like(kind, x, lifter.as_dtype(lifter.reshape(given, spread), x.dtype))
    return x


def _weight_norm(call: Call) -> Value:
    """Every row of ``v`` brought to the length that ``g`` gives."""
    v, lifter = call["v"], call.lifter
    rank = len(v.shape)
    kept = None if call["dim"] == -1 else call["dim"] % rank
    dims = tuple(d for d in range(rank) if d != kept)
    squares = lifter.emit_like("square", v)
    total = lifter.emit("sum", [squares], thin(v.shape, dims), v.dtype, dims=dims, keepdim=True)
    length = lifter.emit_like("sqrt", total)
    share = lifter.emit("div", [call["g"], length], length.shape, v.dtype)
    return lifter.emit_like("mul", v, share)


def _embedding(call: Call) -> Value:
    ids, weight, padding = call["indices"], call["weight"], call["padding_idx"]
    check_gradients(call)
    padding = padding if padding is not None and padding >= 0 else None
    shape = (*ids.shape, weight.shape[1])
    return call.lifter.emit("embedding", [ids, weight], shape, weight.dtype, padding_idx=padding)


def _softmax(kind: str) -> Lift:
    def lift(call: Call) -> Value:
        x, dtype = call.x, call.made.dtype
        attrs: dict[str, Any] = {"dim": call["dim"] % len(x.shape)}
        if dtype != x.dtype or call.get("dtype") is torch.float32:
            attrs["dtype"] = dtype
        return call.lifter.emit(kind, [x], x.shape, dtype, **attrs)

    return lift


TABLE: dict[str, Lift] = {
    **ELEMENTWISE,
    **SHAPES,
    **REDUCTIONS,
    **PRODUCTS,
    **LOSSES,
    **NOISE,
    **OF_REAL,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "batch_norm": _batch_norm,
    "_weight_norm": _weight_norm,
    "embedding": _embedding,
    "embedding_bag": embedding_bag,
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
    **LOOKUPS,
}
