"""Losses, as the elementwise ops, lookups and reductions that they are made of.

A cross-entropy of class indices is a kind of its own, for it can be split over the classes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.aten_elementwise import Arguments, Lift, Unliftable
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter
from autopar.frontends.pytorch.original_calls import original_call
from autopar.torch_private.ops import op_name, schema_of

_REDUCTIONS = ("none", "mean", "sum")


def _reduced(lifter: Lifter, x: Value, reduction: int) -> Value:
    if reduction == 0 or x.shape == ():
        return x
    dims = tuple(range(len(x.shape)))
    return lifter.emit(_REDUCTIONS[reduction], [x], (), x.dtype, dims=dims, keepdim=False)


# -- element by element ----------------------------------------------------------------------------


def _difference(kind: str) -> Lift:
    """``kind`` of the difference of input and target."""

    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        x, y = a["self"], a["target"]
        if a.get("weight") is not None:
            raise Unliftable
        shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
        dtype = ir.like(node.meta["val"]).dtype
        less = lifter.emit("sub", [x, y], shape, dtype)
        return _reduced(lifter, lifter.emit(kind, [less], shape, dtype), a["reduction"])

    return lift


def _pointwise(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """The call again without its reduction, and the reduction."""
    target: Any = node.target
    operands = [v for v in a.values() if isinstance(v, Value)]
    call = original_call(lifter, node, operands)
    if call is None:
        raise Unliftable
    place = [argument.name for argument in schema_of(target).arguments].index("reduction")
    args, kwargs = list(call["args"]), dict(call["kwargs"])
    if len(args) > place:
        args[place] = 0
    else:
        kwargs["reduction"] = 0
    shape = torch.broadcast_shapes(*(v.shape for v in operands))  # type: ignore[no-untyped-call]
    dtype = ir.like(node.meta["val"]).dtype
    kind = f"{target.namespace}::{op_name(target)}"
    plain = {"target": call["target"], "args": args, "kwargs": kwargs}
    losses = lifter.emit(kind, operands, shape, dtype, torch=plain)
    return _reduced(lifter, losses, a["reduction"])


def _distance(lifter: Lifter, x: Value, y: Value, p: float, eps: float, keep: bool) -> Value:
    """``norm(x - y + eps)`` over the last dim."""
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    less = lifter.emit("sub", [x, y], shape, x.dtype)
    less = lifter.emit("add", [less], shape, x.dtype, other=eps)
    out = (*shape[:-1], 1) if keep else shape[:-1]
    call = {
        "target": "aten.linalg_vector_norm.default",
        "args": ["%0", p, [-1], keep],
        "kwargs": {},
    }
    return lifter.emit("aten::linalg_vector_norm", [less], out, x.dtype, torch=call)


def _pairwise(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    return _distance(lifter, a["x1"], a["x2"], a["p"], a["eps"], a["keepdim"])


def _triplet(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """``max(margin + d(anchor, positive) - d(anchor, negative), 0)``"""
    if a["swap"]:
        raise Unliftable
    near, far = (
        _distance(lifter, a["anchor"], a[name], a["p"], a["eps"], False)
        for name in ("positive", "negative")
    )
    excess = lifter.emit("sub", [near, far], near.shape, near.dtype)
    excess = lifter.emit("add", [excess], near.shape, near.dtype, other=a["margin"])
    losses = lifter.emit("clamp", [excess], near.shape, near.dtype, min=0, max=None)
    return _reduced(lifter, losses, a["reduction"])


# -- over classes ----------------------------------------------------------------------------------


def _cross_entropy(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    logits, labels = a["self"], a["target"]
    if len(logits.shape) < 2:
        raise Unliftable
    if labels.is_float:
        return _soft_cross_entropy(lifter, a)
    if a["weight"] is not None:
        if a["label_smoothing"]:
            raise Unliftable
        likely = lifter.emit("log_softmax", [logits], logits.shape, logits.dtype, dim=1)
        return _likelihood(lifter, {**a, "self": likely})
    places = labels.shape
    if len(logits.shape) > 2:  # [b, c, *s]: classes to the end, all else one dim
        order = (0, *range(2, len(logits.shape)), 1)
        moved = tuple(logits.shape[d] for d in order)
        logits = lifter.emit("transpose", [logits], moved, logits.dtype, dims=order)
        flat = (math.prod(places), moved[-1])
        logits = lifter.emit("reshape", [logits], flat, logits.dtype, shape=flat)
        labels = lifter.emit("reshape", [labels], flat[:1], labels.dtype, shape=flat[:1])
    reduction = _REDUCTIONS[a["reduction"]]
    loss = lifter.emit(
        "cross_entropy", [logits, labels], labels.shape if reduction == "none" else (),
        logits.dtype, ignore_index=int(a["ignore_index"]), reduction=reduction,
        label_smoothing=float(a["label_smoothing"]),
    )  # fmt: skip
    if loss.shape not in ((), places):
        loss = lifter.emit("reshape", [loss], places, loss.dtype, shape=places)
    return loss


def _soft_cross_entropy(lifter: Lifter, a: Arguments) -> Value:
    """Labels that are probabilities: ``-sum(labels * log_softmax(logits))`` over the classes."""
    logits, labels = a["self"], a["target"]
    shape, dtype = logits.shape, logits.dtype
    rows = (shape[0], *shape[2:])
    if smooth := a["label_smoothing"]:
        labels = lifter.emit("mul", [labels], shape, labels.dtype, other=1 - smooth)
        labels = lifter.emit("add", [labels], shape, labels.dtype, other=smooth / shape[1])
    terms = lifter.emit("log_softmax", [logits], shape, dtype, dim=1)
    terms = lifter.emit("mul", [terms, labels], shape, dtype)
    if a["weight"] is not None:
        wide = (shape[1], *[1] * (len(shape) - 2))
        weight = lifter.emit("reshape", [a["weight"]], wide, a["weight"].dtype, shape=wide)
        terms = lifter.emit("mul", [terms, weight], shape, dtype)
    terms = lifter.emit("sum", [terms], rows, dtype, dims=(1,), keepdim=False)
    return _reduced(lifter, lifter.emit("neg", [terms], rows, dtype), a["reduction"])


def _nll(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """After a log_softmax it is the cross-entropy of what went in there."""
    log_probabilities = a["self"]
    if len(log_probabilities.shape) < 2:
        raise Unliftable
    logits = None if a["weight"] is not None else _logits(lifter, log_probabilities)
    if logits is None:
        return _likelihood(lifter, a)
    return _cross_entropy(lifter, node, {**a, "self": logits, "label_smoothing": 0.0})


def _logits(lifter: Lifter, log_probabilities: Value) -> Value | None:
    """What ``found`` is the log_softmax of over its dim 1, perhaps with leading dims merged."""
    maker = _maker(lifter, log_probabilities)
    views = maker is not None and maker.kind == "reshape"
    inner = _maker(lifter, maker.inputs[0]) if views and maker is not None else maker
    if inner is None or inner.kind != "log_softmax" or "dtype" in inner.attrs:
        return None
    logits = inner.inputs[0]
    if not views:
        return logits if inner.attrs["dim"] == 1 else None
    rows = len(log_probabilities.shape) == 2 and log_probabilities.shape[1] == logits.shape[-1]
    if not rows or inner.attrs["dim"] != len(logits.shape) - 1:
        return None
    return lifter.emit(
        "reshape", [logits], log_probabilities.shape, logits.dtype, shape=log_probabilities.shape
    )


def _maker(lifter: Lifter, value: Value) -> ir.Node | None:
    return next((n for n in reversed(lifter.nodes) if value in n.outputs), None)


def _likelihood(lifter: Lifter, a: Arguments) -> Value:
    """``-weight[label] * x[label]``, zero where the label is ignored; the mean is over weights."""
    x, labels, weight = a["self"], a["target"], a["weight"]
    shape, dtype = labels.shape, x.dtype
    one = (shape[0], 1, *shape[1:])
    counts = lifter.emit("ne", [labels], shape, "bool", other=int(a["ignore_index"]))
    known = lifter.emit("where", [counts, labels], shape, labels.dtype, b=0)
    index = lifter.emit("reshape", [known], one, known.dtype, shape=one)
    picked = lifter.emit("gather", [x, index], one, dtype, dim=1)
    picked = lifter.emit("reshape", [picked], shape, dtype, shape=shape)
    losses = lifter.emit("neg", [picked], shape, dtype)
    weights = lifter.emit("cast", [counts], shape, dtype, dtype=dtype)
    if weight is not None:
        each = lifter.emit("index", [weight, known], shape, weight.dtype, dims=[0])
        weights = lifter.emit("mul", [weights, each], shape, dtype)
    losses = lifter.emit("mul", [losses, weights], shape, dtype)
    if a["reduction"] != 1:
        return _reduced(lifter, losses, a["reduction"])
    totals = [_reduced(lifter, value, 2) for value in (losses, weights)]
    return lifter.emit("div", totals, (), dtype)


LOSSES: dict[str, Lift] = {
    "cross_entropy_loss": _cross_entropy,
    **{name: _nll for name in ("nll_loss", "nll_loss_nd", "nll_loss2d")},
    "pairwise_distance": _pairwise,
    "triplet_margin_loss": _triplet,
    "mse_loss": _difference("square"),
    "l1_loss": _difference("abs"),
    **{
        name: _pointwise
        for name in (
            "smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
        ).split()
    },
}
