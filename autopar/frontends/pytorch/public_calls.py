"""How a person calls an op that has no kind of its own: by a public function of torch.

An emitter writes such a call without knowing torch: it finds in ``attrs["torch"]["public"]`` the
function's name, its tensors in order, and its settings by name where they are not the default.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from autopar.nouns.graph import freeze
from autopar.torch_private.ops import made_from_signature, schema_of

# Functions of torch.nn.functional that take what the op takes, under the same names.
_FUNCTIONAL = {
    **{
        name: name
        for name in (
            "binary_cross_entropy", "binary_cross_entropy_with_logits", "celu", "conv_transpose1d",
            "conv_transpose2d", "conv_transpose3d", "glu", "hardshrink", "hardsigmoid", "hardswish",
            "huber_loss", "kl_div", "l1_loss", "mse_loss", "pixel_shuffle", "pixel_unshuffle",
            "prelu", "relu6", "selu", "smooth_l1_loss", "soft_margin_loss", "softshrink",
        )
    },
    "log_sigmoid": "logsigmoid",
}  # fmt: skip
_REDUCTIONS = ("none", "mean", "sum")
_MODULES = ("linalg", "special", "fft")


def with_public(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attrs of an op, its original call with its ``public`` form where torch has one.

    ``{"function": "F.huber_loss", "args": ("%0", "%1"), "settings": {"delta": 2.0}}``
    """
    original = attrs.get("torch")
    shown = None if original is None else _interpolate(original) or _public(original)
    if original is None or shown is None:
        return dict(attrs)
    return {**attrs, "torch": {**original, "public": freeze(shown)}}


def _public(original: Mapping[str, Any]) -> dict[str, Any] | None:
    function = public(original["target"])
    if function is None:
        return None
    space, name, overload = original["target"].split(".", 2)
    schema = schema_of(getattr(getattr(getattr(torch.ops, space), name), overload))
    given = dict(zip((a.name for a in schema.arguments), original["args"], strict=False))
    given |= original["kwargs"]
    tensors: list[Any] = []
    settings: dict[str, Any] = {}
    for place, argument in enumerate(schema.arguments):
        if argument.name not in given:
            continue
        value = given[argument.name]
        if _has_tensor(value) and not isinstance(value, str) and None in value:
            return None  # of lists of tensors the public functions take those that have no gaps
        leading = len(tensors) == place < _in_order(function, original["target"])
        leading = leading and not argument.kwarg_only
        if leading and _has_tensor(value):
            tensors.append(value)
        elif argument.name == "self":
            return None  # behind a number, and called otherwise there
        elif not argument.has_default_value() or not _equal(value, argument.default_value):
            settings[argument.name] = _setting(argument, value)
    return {"function": function, "args": tensors, "settings": settings}


@cache
def _in_order(function: str, target: str) -> float:
    """How many of the op's first arguments the function takes in the same places: one written in
    Python may have others between them, as losses have ``size_average``."""
    module, _, name = function.rpartition(".")
    written = getattr(F, name) if module == "F" else None
    if not inspect.isfunction(written):
        return math.inf  # made from the op's own signature
    space, op, overload = target.split(".", 2)
    schema = schema_of(getattr(getattr(getattr(torch.ops, space), op), overload))
    names = [*inspect.signature(written).parameters]
    same = [
        theirs == ours or (theirs, ours) == ("input", "self")
        for theirs, ours in zip(names, (a.name for a in schema.arguments), strict=False)
    ]
    return same.index(False) if False in same else len(same)


@cache
def public(target: str) -> str | None:
    """The function of torch that does what an op of ``aten`` does, from the same arguments."""
    space, name, _ = target.split(".", 2)
    if space != "aten":
        return None
    if name in _FUNCTIONAL:
        return f"F.{_FUNCTIONAL[name]}"
    for module in _MODULES:
        short = name.removeprefix(f"{module}_")
        if short != name and hasattr(getattr(torch, module), short):
            return f"torch.{module}.{short}"
    # Those that torch makes from the op's own signature, and does not wrap in Python.
    made = made_from_signature(name)
    same = made is not None and getattr(torch, name, None) == made
    return f"torch.{name}" if same and not name.startswith("_") else None


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, str) and value.startswith("%")


def _equal(value: Any, default: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) == list(default)
    return bool(value == default)


def _setting(argument: Any, value: Any) -> Any:
    if argument.name == "reduction" and isinstance(value, int):
        return _REDUCTIONS[value]
    many = isinstance(value, list | tuple) and argument.N == len(value)
    return _one(value) if many else value


def _one(values: Sequence[Any]) -> Any:
    """One number for all where they are equal, as torch takes it."""
    return values[0] if len(set(values)) == 1 else values


def _interpolate(original: Mapping[str, Any]) -> dict[str, Any] | None:
    """``aten.upsample_bilinear2d.vec(x, size, align_corners, factors)`` as `F.interpolate`."""
    space, name, overload = original["target"].split(".", 2)
    if (space, overload) != ("aten", "vec") or not name.startswith("upsample_"):
        return None
    mode = name.removeprefix("upsample_")[:-2]
    if mode.startswith("nearest"):
        (x, size, factors), corners = original["args"], False
    else:
        x, size, corners, factors = original["args"]
    settings: dict[str, Any] = {}
    if size is not None:
        settings["size"] = size
    if factors is not None:
        settings["scale_factor"] = _one(factors)
    if mode != "nearest":
        settings["mode"] = mode
    if corners:
        settings["align_corners"] = True
    return {"function": "F.interpolate", "args": [x], "settings": settings}
