"""Aten ops that draw random numbers, as `noise`, and dropout.

A draw never depends on the values of an operand: ``randn_like(x)`` is noise of a shape, and
``bernoulli(p)`` of a tensor compares noise with it. So a piece of the noise is drawn where a piece
of it is read.
"""

from __future__ import annotations

from typing import Any

from autopar.frontends.pytorch.aten_call import Call, Lift, Unliftable
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
    return lambda call: _drawn(call.lifter, call.made, distribution, *given)


def _filled(distribution: str, *names: str) -> Lift:
    """``x.uniform_(from, to)`` and the like: arguments by name."""

    def lift(call: Call) -> Value:
        given = _numbers(*(call[name] for name in names))
        return _drawn(call.lifter, call.made, distribution, *given)

    return lift


def _integers(call: Call) -> Value:
    low, high = call.get("low", 0), call["high"]
    if isinstance(low, Value) or isinstance(high, Value):
        raise Unliftable
    return _drawn(call.lifter, call.made, "integers", int(low), int(high))


def _bernoulli(call: Call) -> Value:
    """With a number ``p``, or with a share for every element: where uniform noise is below it."""
    share: Any = call.get("p", call["self"])
    made = call.made
    if not isinstance(share, Value):
        return _drawn(call.lifter, made, "bernoulli", float(share))
    noise = _drawn(call.lifter, Value(made.shape, share.dtype), "uniform", 0.0, 1.0)
    hit = call.lifter.emit("lt", [noise, share], made.shape, "bool")
    return call.result("cast", hit, dtype=made.dtype)


def _normal(call: Call) -> Value:
    """In place or of a size with two numbers; else mean or deviation are tensors, to which no
    gradient flows."""
    mean, deviation = call["mean"], call["std"]
    if not isinstance(mean, Value) and not isinstance(deviation, Value):
        return _drawn(call.lifter, call.made, "normal", *_numbers(mean, deviation))
    x = _drawn(call.lifter, call.made, "normal", 0.0, 1.0)
    for kind, value in (("mul", deviation), ("add", mean)):
        if isinstance(value, Value):
            x = call.result(kind, x, call.lifter.emit_like("detach", value))
        else:
            x = call.result(kind, x, other=float(value))
    return x


def _dropout(features: bool = False, alpha: bool = False) -> Lift:
    """``features``: whole features of ``x [b, c, *s]`` are dropped, one number for each; ``alpha``:
    what is dropped gets the least value of SELU, and mean and variance stay."""

    def lift(call: Call) -> Value:
        if not call["train"] or call["p"] == 0:
            return call.x
        whole = {"features": True} if features and len(call.x.shape) > 2 else {}
        shifted = {"alpha": True} if alpha else {}
        return call.lifter.emit_like("dropout", call.x, p=float(call["p"]), **whole, **shifted)

    return lift


def _random_leaky(call: Call) -> Value:
    """``rrelu``: the slope below zero is drawn for every element; their mean in evaluation."""
    x, low, high = call.x, float(call["lower"]), float(call["upper"])
    if not call["training"]:
        return call.result("leaky_relu", x, negative_slope=(low + high) / 2)
    slope = _drawn(call.lifter, x, "uniform", low, high)
    below = call.lifter.emit("le", [x], x.shape, "bool", other=0.0)
    sloping = call.lifter.emit_like("mul", x, slope)
    return call.lifter.emit("where", [below, sloping, x], x.shape, x.dtype)


def _log_normal(call: Call) -> Value:
    made = call.made
    given = _numbers(call["mean"], call["std"])
    return call.lifter.emit_like("exp", _drawn(call.lifter, made, "normal", *given))


NOISE: dict[str, Lift] = {
    **dict.fromkeys(("rand", "rand_like"), _plain("uniform", 0.0, 1.0)),
    **dict.fromkeys(("randn", "randn_like"), _plain("normal", 0.0, 1.0)),
    **dict.fromkeys(("randint", "randint_like"), _integers),
    "uniform": _filled("uniform", "from", "to"),
    "exponential": _filled("exponential", "lambd"),
    "normal": _normal,
    "bernoulli": _bernoulli,
    "dropout": _dropout(),
    "feature_dropout": _dropout(features=True),
    "alpha_dropout": _dropout(alpha=True),
    "feature_alpha_dropout": _dropout(features=True, alpha=True),
    "rrelu": _random_leaky,
    "log_normal": _log_normal,
}
