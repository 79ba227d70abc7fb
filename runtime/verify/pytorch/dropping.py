"""Functions of torch that drop out, as products with `dropout_factor` of their share.

Ranks cannot drop what one device drops. Left out altogether, a dropout that a program lost, has
twice or has with another share would not show; so model and program multiply by one number that
depends on the share, by the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from autopar.frontends.shared.noise import dropout_factor

Arguments = tuple[Any, ...]
Named = dict[str, Any]


_drops: ContextVar[bool] = ContextVar("drops", default=True)


@contextmanager
def nothing_dropped() -> Iterator[None]:
    """Inside, nothing is dropped by whatever function: as where a program is evaluated."""
    before = _drops.set(False)
    try:
        yield
    finally:
        _drops.reset(before)


def dropped_fixed(name: str, func: Any, args: Arguments, kwargs: Named) -> Any:
    """What ``func`` of this name gives where it drops nothing by chance; None where it drops out
    nowhere."""
    if name in _PLAIN:
        return _plain(name, args, kwargs)
    special = _SPECIAL.get(name)
    return None if special is None else special(func, args, kwargs)


def _argument(args: Arguments, kwargs: Named, place: int, names: str, default: Any) -> Any:
    """The argument at ``place``, or by the first of ``names`` that is given."""
    if len(args) > place:
        return args[place]
    return next((kwargs[n] for n in names.split() if n in kwargs), default)


def _plain(name: str, args: Arguments, kwargs: Named) -> Any:
    """``dropout(x, p, training)`` and the like, as functions of torch and of its ``functional``."""
    x = args[0] if args else kwargs["input"]
    if not _argument(args, kwargs, 2, "training train", "alpha" not in name):
        return x
    # a row of one dim is a feature of one number, but `F.dropout1d` takes x [c, l] for one sample
    features = name in _FEATURES and (x.dim() > 2 or name == "dropout1d")
    share = _factor(_argument(args, kwargs, 1, "p", 0.5), features, "alpha" in name)
    # A tensor is kept for backward, as a mask is: a block that runs again runs as far as there.
    factor = torch.full((), share, dtype=x.dtype, device=x.device)
    if name.endswith("_") or _argument(args, kwargs, 3, "inplace", False):
        return x.mul_(factor)
    return x * factor


def _factor(p: float, features: bool = False, alpha: bool = False) -> float:
    return dropout_factor(p, features, alpha) if _drops.get() else 1.0


def _native(func: Any, args: Arguments, kwargs: Named) -> Any:
    """``native_dropout(x, p, train)``: the result, and what was kept."""
    x = args[0] if args else kwargs["input"]
    train = _argument(args, kwargs, 2, "train", None)
    given = {"p": _argument(args, kwargs, 1, "p", 0.5), "train": train is None or train}
    return _plain("dropout", (x,), given), torch.ones_like(x, dtype=torch.bool)


def _attention(func: Any, args: Arguments, kwargs: Named) -> Any:
    """Scores are dropped, and the result is linear in them."""
    p = _argument(args, kwargs, 4, "dropout_p", 0.0)
    return _replaced(func, args, kwargs, {(4, "dropout_p"): 0.0}) * _factor(p)


def _multi_head(func: Any, args: Arguments, kwargs: Named) -> Any:
    """`F.multi_head_attention_forward`: the scores are behind the weight of the last product."""
    p = _argument(args, kwargs, 10, "dropout_p", 0.0)
    if not p or not _argument(args, kwargs, 13, "training", True):
        return func(*args, **kwargs)
    factor = _factor(p)
    weight = _argument(args, kwargs, 11, "out_proj_weight", None) * factor
    given = {(10, "dropout_p"): 0.0, (11, "out_proj_weight"): weight}
    result, scores = _replaced(func, args, kwargs, given)
    return result, None if scores is None else scores * factor


def _recurrent(func: Any, args: Arguments, kwargs: Named) -> Any:
    """``lstm(x, states, weights, biases, layers, dropout, train, ...)``; of packed sequences, the
    sizes come second. What goes from layer to layer is dropped: it is behind its first weight."""
    start = 2 if len(args) < 4 or isinstance(args[3], bool) else 3
    p = _argument(args, kwargs, start + 3, "dropout", 0.0)
    if not p or not _argument(args, kwargs, start + 4, "train", True):
        return func(*args, **kwargs)
    weights = list(_argument(args, kwargs, start, "params", ()))
    layers, both = (
        _argument(args, kwargs, start + place, name, given)
        for place, name, given in ((2, "num_layers", 1), (5, "bidirectional", False))
    )
    each = len(weights) // (layers * (2 if both else 1))
    for first in range(len(weights) // layers, len(weights), each):
        weights[first] = weights[first] * _factor(p)
    given = {(start, "params"): weights, (start + 3, "dropout"): 0.0}
    return _replaced(func, args, kwargs, given)


def _replaced(
    func: Any, args: Arguments, kwargs: Named, given: Mapping[tuple[int, str], Any]
) -> Any:
    """``func`` with other arguments at these places, or of these names."""
    listed, named = list(args), dict(kwargs)
    for (place, name), value in given.items():
        if place < len(listed):
            listed[place] = value
        else:
            named[name] = value
    return func(*listed, **named)


_FEATURES = frozenset(
    "dropout1d dropout2d dropout3d feature_dropout feature_dropout_ feature_alpha_dropout "
    "feature_alpha_dropout_".split()
)
_PLAIN = _FEATURES | frozenset("dropout dropout_ alpha_dropout alpha_dropout_".split())
_SPECIAL: Mapping[str, Callable[[Any, Arguments, Named], Any]] = {
    "native_dropout": _native,
    F.scaled_dot_product_attention.__name__: _attention,
    "multi_head_attention_forward": _multi_head,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
}
