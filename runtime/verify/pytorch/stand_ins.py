"""The functions of torch that draw random numbers, with one fixed number for every draw.

Ranks cannot draw what one device draws, so what is compared draws nothing: the model and the
program get the same stand-ins (`autopar.frontends.shared.noise`), by the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.frontends.shared.noise import HAPPENS_ABOVE, stand_in

above: ContextVar[float] = ContextVar("above", default=HAPPENS_ABOVE[0])
"""How likely what is drawn has to be so that it happens."""

_IN_PLACE: Mapping[str, tuple[str, tuple[tuple[str, float], ...]]] = {
    "uniform_": ("uniform", (("from", 0.0), ("to", 1.0))),
    "normal_": ("normal", (("mean", 0.0), ("std", 1.0))),
    "exponential_": ("exponential", (("lambd", 1.0),)),
}
_PLAIN: Mapping[str, tuple[str, tuple[float, ...]]] = {
    **dict.fromkeys(("rand", "rand_like"), ("uniform", (0.0, 1.0))),
    **dict.fromkeys(("randn", "randn_like"), ("normal", (0.0, 1.0))),
}


def drawn_fixed(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` of this name gives where nothing is drawn; None where it draws nothing."""
    if name in _PLAIN:
        distribution, given = _PLAIN[name]
        return func(*args, **kwargs).fill_(stand_in(distribution, *given, above=above.get()))
    if name in _IN_PLACE:
        distribution, named = _IN_PLACE[name]
        numbers = [
            args[place] if len(args) > place else kwargs.get(key, default)
            for place, (key, default) in enumerate(named, 1)
        ]
        filled: Tensor = args[0].fill_(stand_in(distribution, *numbers, above=above.get()))
        return filled
    special = _SPECIAL.get(name)
    return None if special is None else special(func, args, kwargs)


def _integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``randint(low=0, high, size)``, ``randint_like(x, low=0, high)``"""
    bounds = [a for a in args if isinstance(a, int)]
    bounds += [kwargs[n] for n in ("low", "high") if n in kwargs]
    low, high = ([0, *bounds])[-2:]
    made: Tensor = func(*args, **kwargs)
    return made.fill_(stand_in("integers", low, high))


def _bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``bernoulli(x)`` of shares, ``bernoulli(x, p)``"""
    x: Tensor = args[0] if args else kwargs["input"]
    p = args[1] if len(args) > 1 else kwargs.get("p", x)
    likely: Tensor = (x if p is x else torch.zeros_like(x) + p) > above.get()
    if isinstance(p, Tensor):
        return likely.to(x.dtype)
    return torch.full_like(x, _happens(x, p))


def _bernoulli_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    x: Tensor = args[0]
    if isinstance(p, Tensor):
        return x.copy_(p > above.get())
    return x.fill_(_happens(x, p))


def _happens(x: Tensor, p: float) -> float:
    return stand_in("bernoulli", p, whole=not x.is_floating_point(), above=above.get())


def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``normal(mean, std)`` of tensors, ``normal(mean, std, size)`` of numbers"""
    given = dict(zip(("mean", "std"), args, strict=False)) | kwargs
    mean, deviation = given["mean"], given.get("std", 1.0)
    if isinstance(mean, Tensor) or isinstance(deviation, Tensor):
        both: Tensor = mean + deviation
        return both.detach()
    made: Tensor = func(*args, **kwargs)
    return made.fill_(stand_in("normal", mean, deviation))


def _log_normal_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = {
        "mean": 1.0,
        "std": 2.0,
        **dict(zip(("mean", "std"), args[1:], strict=False)),
        **kwargs,
    }
    filled: Tensor = args[0].fill_(math.exp(stand_in("normal", given["mean"], given["std"])))
    return filled


def _rrelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``rrelu(x, lower, upper, training)``: one slope for all."""
    names = ("input", "lower", "upper", "training", "inplace")
    given = dict(zip(names, args, strict=False)) | kwargs
    low, high = given.get("lower", 1 / 8), given.get("upper", 1 / 3)
    if not given.get("training", False):
        made: Tensor = func(*args, **kwargs)
        return made
    slope = stand_in("uniform", low, high, above=above.get())
    function = F.leaky_relu_ if given.get("inplace") or func.__name__ == "rrelu_" else F.leaky_relu
    sloping: Tensor = function(given["input"], slope)
    return sloping


def _gumbel_softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Its noise, the logarithm of an exponential number, is the logarithm of one."""
    given = dict(zip(("logits", "tau", "hard", "eps", "dim"), args, strict=False)) | kwargs
    dim = given.get("dim", -1)
    soft: Tensor = (given["logits"] / given.get("tau", 1)).softmax(dim)
    if not given.get("hard", False):
        return soft
    best: Tensor = F.one_hot(soft.argmax(dim), soft.shape[dim]).movedim(-1, dim)
    return soft - soft.detach() + best


_SPECIAL: Mapping[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Tensor]] = {
    **dict.fromkeys(("randint", "randint_like"), _integers),
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_,
    "normal": _normal,
    "gumbel_softmax": _gumbel_softmax,
    "log_normal_": _log_normal_,
    **dict.fromkeys(("rrelu", "rrelu_"), _rrelu),
}
