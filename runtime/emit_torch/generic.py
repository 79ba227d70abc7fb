"""Ops of kinds that have no printer: the original call again, from ``attrs["torch"]``.

Most are printed as the public function of torch that they are, their settings by name; the rest as
``torch.ops.ns.name.overload``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from autopar.rules.own_functions import FUNCTION, LINEAR
from autopar.runtime.emit_torch.site import EmitError, Site
from autopar.runtime.emit_torch.text import Expr, call, literal

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


def generic(site: Site) -> Expr:
    """The call of ``attrs["torch"]``; ``"%0"`` in its arguments is operand 0.

    It is ``{"target": "aten.hypot.default", "args": [...], "kwargs": {...}}``.
    """
    if FUNCTION in site.attrs:
        return _own_function(site, site.attrs[FUNCTION])
    original = site.attrs.get("torch")
    if original is None:
        raise EmitError(
            f"op {site.kind!r} ({site.at.op.source}) has no printer and no original torch call"
        )
    target = str(original["target"]).replace("::", ".")
    args, kwargs = original.get("args", ()), dict(original.get("kwargs", {}))
    resized = _interpolate(site, target, args)
    if resized is not None:
        return resized
    function = public(target)
    if function is None:
        arguments = [_argument(site, a) for a in args]
        arguments += [f"{n}={_argument(site, a)}" for n, a in kwargs.items()]
        return Expr(call(f"torch.ops.{target}", arguments), weight=2)
    return Expr(call(function, _named(site, target, args, kwargs)), weight=2)


def _own_function(site: Site, function: Mapping[str, Any]) -> Expr:
    """``own_function("model:Round", x, 8)``: a backward of the model's own."""
    arguments = [literal(function["path"]), *(_plain(site, a) for a in function["args"])]
    if not function[LINEAR]:
        arguments.append("whole_gradient=True")
    return Expr(call("own_function", arguments), weight=2)


def _plain(site: Site, value: Any) -> str:
    """`_argument`, with tuples as they are."""
    if isinstance(value, tuple | list):
        inner = ", ".join(_plain(site, v) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return _argument(site, value)


@cache
def public(target: str) -> str | None:
    """The function of torch that does what an op of ``aten`` does, from the same arguments."""
    import torch

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
    found = getattr(torch._C._VariableFunctions, name, None)
    same = found is not None and getattr(torch, name, None) == found
    return f"torch.{name}" if same and not name.startswith("_") else None


def _named(site: Site, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Arguments as text: tensors in order, then settings by name where they are not the default."""
    import torch

    space, name, overload = target.split(".", 2)
    packet = getattr(getattr(torch.ops, space), name)
    schema = getattr(packet, overload)._schema
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    texts: list[str] = []
    for place, argument in enumerate(schema.arguments):
        if argument.name not in given:
            continue
        value = given[argument.name]
        leading = len(texts) == place and all("=" not in t.split("(")[0] for t in texts)
        if leading and not argument.kwarg_only and _has_tensor(value):
            texts.append(_argument(site, value))
        elif not argument.has_default_value() or not _equal(value, argument.default_value):
            texts.append(f"{argument.name}={_setting(site, argument, value)}")
    return texts


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, str) and value.startswith("%")


def _equal(value: Any, default: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) == list(default)
    return bool(value == default)


def _setting(site: Site, argument: Any, value: Any) -> str:
    if argument.name == "reduction" and isinstance(value, int):
        return literal(_REDUCTIONS[value])
    many = isinstance(value, list | tuple) and argument.N == len(value)
    if many and len(set(value)) == 1:  # torch takes one number for all
        return literal(value[0])
    return _argument(site, value)


def _interpolate(site: Site, target: str, args: Sequence[Any]) -> Expr | None:
    """``aten.upsample_bilinear2d.vec(x, size, align_corners, factors)`` as `F.interpolate`."""
    space, name, overload = target.split(".", 2)
    if (space, overload) != ("aten", "vec") or not name.startswith("upsample_"):
        return None
    mode = name.removeprefix("upsample_")[:-2]
    if mode.startswith("nearest"):
        (x, size, factors), corners = args, False
    else:
        x, size, corners, factors = args
    arguments = [_argument(site, x)]
    if size is not None:
        arguments.append(f"size={_argument(site, size)}")
    if factors is not None:
        one = len(set(factors)) == 1
        arguments.append(f"scale_factor={literal(factors[0] if one else tuple(factors))}")
    if mode != "nearest":
        arguments.append(f'mode="{mode}"')
    if corners:
        arguments.append("align_corners=True")
    return Expr(call("F.interpolate", arguments), weight=2)


def _argument(site: Site, value: Any) -> str:
    if isinstance(value, str) and value.startswith("%"):
        return site.args[int(value[1:])].text
    if isinstance(value, str) and value.startswith("torch."):
        return "FP32" if value == "torch.float32" else value
    if isinstance(value, tuple | list):
        return f"[{', '.join(_argument(site, v) for v in value)}]"
    return literal(value)
