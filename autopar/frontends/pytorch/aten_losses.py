"""Losses, as the elementwise ops, lookups and reductions that they are made of.

A cross-entropy of class indices is a kind of its own, for it can be split over the classes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.frontends.pytorch.aten_call import Call, Lift, Unliftable, torch_call
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

    def lift(call: Call) -> Value:
        x, y = call["self"], call["target"]
        if call.get("weight") is not None:
            raise Unliftable
        shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
        less = call.lifter.emit("sub", [x, y], shape, call.made.dtype)
        return _reduced(call.lifter, call.lifter.emit_like(kind, less), call["reduction"])

    return lift


def _pointwise(call: Call) -> Value:
    """The call again without its reduction, and the reduction."""
    target: Any = call.node.target
    operands = [v for v in call.arguments.values() if isinstance(v, Value)]
    original = original_call(call.lifter, call.node, operands)
    if original is None:
        raise Unliftable
    place = [argument.name for argument in schema_of(target).arguments].index("reduction")
    args, kwargs = list(original["args"]), dict(original["kwargs"])
    if len(args) > place:
        args[place] = 0
    else:
        kwargs["reduction"] = 0
    shape = torch.broadcast_shapes(*(v.shape for v in operands))  # type: ignore[no-untyped-call]
    kind = f"{target.namespace}::{op_name(target)}"
    plain = torch_call(original["target"], *args, **kwargs)
    losses = call.lifter.emit(kind, operands, shape, call.made.dtype, torch=plain)
    return _reduced(call.lifter, losses, call["reduction"])


def _distance(lifter: Lifter, x: Value, y: Value, p: float, eps: float, keep: bool) -> Value:
    """``norm(x - y + eps)`` over the last dim."""
    shape = torch.broadcast_shapes(x.shape, y.shape)  # type: ignore[no-untyped-call]
    less = lifter.emit_like("add", lifter.emit("sub", [x, y], shape, x.dtype), other=eps)
    out = (*shape[:-1], 1) if keep else shape[:-1]
    norm = torch_call("aten.linalg_vector_norm.default", "%0", p, [-1], keep)
    return lifter.emit("aten::linalg_vector_norm", [less], out, x.dtype, torch=norm)


def _pairwise(call: Call) -> Value:
    form = (call["p"], call["eps"], call["keepdim"])
    return _distance(call.lifter, call["x1"], call["x2"], *form)


def _triplet(call: Call) -> Value:
    """``max(margin + d(anchor, positive) - d(anchor, negative), 0)``"""
    if call["swap"]:
        raise Unliftable
    lifter = call.lifter
    near, far = (
        _distance(lifter, call["anchor"], call[name], call["p"], call["eps"], False)
        for name in ("positive", "negative")
    )
    excess = lifter.emit_like("add", lifter.emit_like("sub", near, far), other=call["margin"])
    losses = lifter.emit_like("clamp", excess, min=0, max=None)
    return _reduced(lifter, losses, call["reduction"])


# -- over classes ----------------------------------------------------------------------------------


def _cross_entropy(call: Call) -> Value:
    logits, labels, lifter = call["self"], call["target"], call.lifter
    if len(logits.shape) < 2:
        raise Unliftable
    if labels.is_float:
        return _soft_cross_entropy(call)
    if call["weight"] is not None:
        logs = lifter.emit_like("log_softmax", logits, dim=1)
        return _likelihood(call.but(self=logs), float(call["label_smoothing"]))
    places = labels.shape
    if len(logits.shape) > 2:  # [b, c, *s]: classes to the end, all else one dim
        logits = lifter.transpose(logits, (0, *range(2, len(logits.shape)), 1))
        logits = lifter.reshape(logits, (math.prod(places), logits.shape[-1]))
        labels = lifter.reshape(labels, logits.shape[:1])
    reduction = _REDUCTIONS[call["reduction"]]
    loss = lifter.emit(
        "cross_entropy", [logits, labels], labels.shape if reduction == "none" else (),
        logits.dtype, ignore_index=int(call["ignore_index"]), reduction=reduction,
        label_smoothing=float(call["label_smoothing"]),
    )  # fmt: skip
    return lifter.reshape(loss, places) if loss.shape else loss


def _soft_cross_entropy(call: Call) -> Value:
    """Labels that are probabilities: ``-sum(labels * log_softmax(logits))`` over the classes."""
    logits, labels, lifter = call["self"], call["target"], call.lifter
    shape, dtype = logits.shape, logits.dtype
    if smooth := call["label_smoothing"]:
        labels = lifter.emit("mul", [labels], shape, labels.dtype, other=1 - smooth)
        labels = lifter.emit_like("add", labels, other=smooth / shape[1])
    terms = lifter.emit_like("log_softmax", logits, dim=1)
    terms = lifter.emit_like("mul", terms, labels)
    if call["weight"] is not None:
        wide = (shape[1], *[1] * (len(shape) - 2))
        terms = lifter.emit_like("mul", terms, lifter.reshape(call["weight"], wide))
    rows = (shape[0], *shape[2:])
    terms = lifter.emit("sum", [terms], rows, dtype, dims=(1,), keepdim=False)
    return _reduced(lifter, lifter.emit_like("neg", terms), call["reduction"])


def _nll(call: Call) -> Value:
    """After a log_softmax it is the cross-entropy of what went in there."""
    if len(call.x.shape) < 2:
        raise Unliftable
    logits = None if call["weight"] is not None else _logits(call.lifter, call.x)
    if logits is None:
        return _likelihood(call)
    return _cross_entropy(call.but(self=logits, label_smoothing=0.0))


def _logits(lifter: Lifter, log_probabilities: Value) -> Value | None:
    """What ``log_probabilities`` are the log_softmax of over dim 1, perhaps with leading dims
    merged."""
    maker = lifter.maker(log_probabilities)
    views = maker is not None and maker.kind == "reshape"
    inner = lifter.maker(maker.inputs[0]) if views and maker is not None else maker
    if inner is None or inner.kind != "log_softmax" or "dtype" in inner.attrs:
        return None
    logits = inner.inputs[0]
    if not views:
        return logits if inner.attrs["dim"] == 1 else None
    rows = len(log_probabilities.shape) == 2 and log_probabilities.shape[1] == logits.shape[-1]
    if not rows or inner.attrs["dim"] != len(logits.shape) - 1:
        return None
    return lifter.reshape(logits, log_probabilities.shape)


def _likelihood(call: Call, smooth: float = 0.0) -> Value:
    """``-weight[label] * x[label]``, zero where the label is ignored; the mean is over weights.

    Smoothed, that counts ``1 - smooth``, and every class ``smooth`` over how many there are.
    """
    x, labels, weight, lifter = call["self"], call["target"], call["weight"], call.lifter
    shape, dtype = labels.shape, x.dtype
    counts = lifter.emit("ne", [labels], shape, "bool", other=int(call["ignore_index"]))
    known = lifter.emit("where", [counts, labels], shape, labels.dtype, b=0)
    index = lifter.reshape(known, (shape[0], 1, *shape[1:]))
    picked = lifter.emit("gather", [x, index], index.shape, dtype, dim=1)
    losses = lifter.emit_like("neg", lifter.reshape(picked, shape))
    weights = lifter.as_dtype(counts, dtype)
    if weight is not None:
        each = lifter.emit("index", [weight, known], shape, weight.dtype, dims=[0])
        weights = lifter.emit_like("mul", weights, each)
    losses = lifter.emit_like("mul", losses, weights)
    if smooth:
        wide = (x.shape[1], *[1] * (len(x.shape) - 2))
        every = lifter.emit_like("mul", x, lifter.reshape(weight, wide))
        every = lifter.emit("sum", [every], shape, dtype, dims=(1,), keepdim=False)
        every = lifter.emit("where", [counts, every], shape, dtype, b=0)
        every = lifter.emit_like("mul", every, other=-smooth / x.shape[1])
        losses = lifter.emit_like("mul", losses, other=1 - smooth)
        losses = lifter.emit_like("add", losses, every)
    if call["reduction"] != 1:
        return _reduced(lifter, losses, call["reduction"])
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
