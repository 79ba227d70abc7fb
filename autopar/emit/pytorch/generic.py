"""Ops of kinds that have no printer: the original call again, from ``attrs["torch"]``.

Most are printed as the public function of torch that the frontend found for them, their settings by
name; the rest as ``torch.ops.ns.name.overload``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.emit.constants import literal
from autopar.emit.pytorch.site import EmitError, Site
from autopar.emit.text import Expr, call
from autopar.rules.own_functions import FUNCTION, LINEAR

TRAINING = frozenset(("train", "training"))
"""Names by which functions of torch are told that they train."""


def generic(site: Site) -> Expr:
    """The call of ``attrs["torch"]``; ``"%0"`` in its arguments is operand 0.

    It is ``{"target": "aten.hypot.default", "args": [...], "kwargs": {...}}``, with ``"public":
    {"function": "torch.hypot", "args": [...], "settings": {...}}`` where there is one, and
    ``"listed"`` where it gives a list of one tensor.
    """
    if FUNCTION in site.attrs:
        return _own_function(site, site.attrs[FUNCTION])
    original = site.attrs.get("torch")
    if original is None:
        raise EmitError(
            f"op {site.kind!r} ({site.at.op.source}) has no printer and no original torch call"
        )
    public = original.get("public")
    if public is None:
        target = original["target"].replace("::", ".")
        function, args, settings = f"torch.ops.{target}", original["args"], original["kwargs"]
    else:
        function, args, settings = public["function"], public["args"], public["settings"]
    arguments = [_argument(site, a) for a in args]
    arguments += [f"{name}={_setting(site, name, a)}" for name, a in settings.items()]
    only = "[0]" if original.get("listed") else ""
    return Expr(call(function, arguments) + only, weight=2)


def _setting(site: Site, name: str, value: Any) -> str:
    """What is done in training alone, as dropout between recurrent layers is, is not where the
    program is evaluated."""
    return "self.training" if name in TRAINING and value is True else _argument(site, value)


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


def _argument(site: Site, value: Any) -> str:
    if isinstance(value, str) and value.startswith("%"):
        return site.args[int(value[1:])].text
    if isinstance(value, str) and value.startswith("torch."):
        return "FP32" if value == "torch.float32" else value
    if isinstance(value, tuple | list):
        return f"[{', '.join(_argument(site, v) for v in value)}]"
    return literal(value)
