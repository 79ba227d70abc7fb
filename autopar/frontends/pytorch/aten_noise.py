"""Aten ops that draw random numbers, as `noise`, and dropout.

A draw never depends on the values of an operand: ``randn_like(x)`` is noise of a shape, and
``bernoulli(p)`` of a tensor compares noise with it. So a piece of the noise is drawn where a piece
of it is read.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.aten_elementwise import Arguments, Lift, Unliftable
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter


def _drawn(lifter: Lifter, like: Value, distribution: str, *given: float) -> Value:
    """Noise of the shape and dtype of ``like``; ``given`` as in the kind's line."""
    return lifter.emit(
        "noise", [], like.shape, like.dtype,
        shape=like.shape, dtype=like.dtype, distribution=distribution, given=given,
    )  # fmt: skip


def _numbers(*numbers: Any) -> tuple[float, ...]:
    if any(isinstance(v, Value) for v in numbers):
        raise Unliftable
    return tuple(map(float, numbers))


def _plain(distribution: str, *given: float) -> Lift:
    """``rand``, ``randn`` and their likes: one distribution."""

    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        return _drawn(lifter, ir.like(node.meta["val"]), distribution, *given)

    return lift


def _filled(distribution: str, *names: str) -> Lift:
    """``x.uniform_(from, to)`` and the like: arguments by name."""

    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        given = _numbers(*(a[name] for name in names))
        return _drawn(lifter, ir.like(node.meta["val"]), distribution, *given)

    return lift


def _integers(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    low, high = a.get("low", 0), a["high"]
    if isinstance(low, Value) or isinstance(high, Value):
        raise Unliftable
    return _drawn(lifter, ir.like(node.meta["val"]), "integers", int(low), int(high))


def _bernoulli(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """With a number ``p``, or with a share for every element: where uniform noise is below it."""
    share: Any = a.get("p", a["self"])
    meta = ir.like(node.meta["val"])
    if not isinstance(share, Value):
        return _drawn(lifter, meta, "bernoulli", float(share))
    noise = _drawn(lifter, Value(meta.shape, share.dtype), "uniform", 0.0, 1.0)
    hit = lifter.emit("lt", [noise, share], meta.shape, "bool")
    return lifter.emit("cast", [hit], meta.shape, meta.dtype, dtype=meta.dtype)


def _normal(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """In place or of a size with two numbers; else mean or deviation are tensors."""
    meta, mean, deviation = ir.like(node.meta["val"]), a["mean"], a["std"]
    if not isinstance(mean, Value) and not isinstance(deviation, Value):
        return _drawn(lifter, meta, "normal", *_numbers(mean, deviation))
    x = _drawn(lifter, meta, "normal", 0.0, 1.0)
    for kind, value in (("mul", deviation), ("add", mean)):
        if isinstance(value, Value):
            x = lifter.emit(kind, [x, value], meta.shape, meta.dtype)
        else:
            x = lifter.emit(kind, [x], meta.shape, meta.dtype, other=float(value))
    return x


def _dropout(features: bool) -> Lift:
    """``features``: whole features of ``x [b, c, *s]`` are dropped, one number for each."""

    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        x: Value = next(iter(a.values()))  # "input", and "self" in place
        if not a["train"] or a["p"] == 0:
            return x
        whole = {"features": True} if features and len(x.shape) > 2 else {}
        return lifter.emit("dropout", [x], x.shape, x.dtype, p=float(a["p"]), **whole)

    return lift


NOISE: dict[str, Lift] = {
    **dict.fromkeys(("rand", "rand_like"), _plain("uniform", 0.0, 1.0)),
    **dict.fromkeys(("randn", "randn_like"), _plain("normal", 0.0, 1.0)),
    **dict.fromkeys(("randint", "randint_like"), _integers),
    "uniform": _filled("uniform", "from", "to"),
    "exponential": _filled("exponential", "lambd"),
    "normal": _normal,
    "bernoulli": _bernoulli,
    "dropout": _dropout(False),
    "feature_dropout": _dropout(True),
}
