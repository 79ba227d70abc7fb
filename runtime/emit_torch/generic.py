"""Ops of kinds that have no printer: the original call again, from ``attrs["torch"]``."""

from __future__ import annotations

from typing import Any

from autopar.runtime.emit_torch.site import EmitError, Site
from autopar.runtime.emit_torch.text import Expr, call, literal


def generic(site: Site) -> Expr:
    """``torch.ops.ns.name.overload(args)``; ``"%0"`` in the arguments is operand 0.

    ``attrs["torch"]`` is ``{"target": "aten.hypot.default", "args": [...], "kwargs": {...}}``.
    """
    original = site.attrs.get("torch")
    if original is None:
        raise EmitError(
            f"op {site.kind!r} ({site.at.op.source}) has no printer and no original torch call"
        )
    arguments = [_argument(site, a) for a in original.get("args", ())]
    arguments += [f"{n}={_argument(site, a)}" for n, a in dict(original.get("kwargs", {})).items()]
    target = str(original["target"]).replace("::", ".")
    return Expr(call(f"torch.ops.{target}", arguments), weight=2)


def _argument(site: Site, value: Any) -> str:
    if isinstance(value, str) and value.startswith("%"):
        return site.args[int(value[1:])].text
    if isinstance(value, str) and value.startswith("torch."):
        return "FP32" if value == "torch.float32" else value
    if isinstance(value, tuple | list):
        return f"[{', '.join(_argument(site, v) for v in value)}]"
    return literal(value)
