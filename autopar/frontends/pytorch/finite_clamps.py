"""Branches that clamp what is not finite, as transformers' DETR and its kin have them.

``if not torch.isfinite(h).all(): h = h.clamp(-limit, limit)`` with the dtype's largest number as
the limit leaves a finite tensor, and its gradient, as they are, so it may run at every step. Of
``torch.finfo(h.dtype).max - 1000`` that is true in float32, bfloat16 and float64, where 1000 is
lost; in float16 it is 64504, and there are finite numbers beyond.

A question that only asks for infinite numbers is as good: a clamp leaves what is no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autopar.frontends.pytorch.errors import DataDependentError
from autopar.frontends.pytorch.ir import Node, Value
from autopar.frontends.pytorch.makers import Makers, plain

_UNCHANGED_IN = ("float32", "bfloat16", "float64")
_COMPUTED_IN = ("float32", "bfloat16")


def asked_of(asked: Any, truth: bool, makers: Makers) -> Value | None:
    """The tensor that has no infinite number where what is ``asked`` is not ``truth``."""
    made = makers.get(plain(asked, makers)) if isinstance(asked, Value) else None
    if made is None or made.output.shape != ():
        return None
    if made.kind == "not":
        return asked_of(made.inputs[0], not truth, makers)
    if made.kind == "or" and truth:
        return _first(asked_of(v, truth, makers) for v in made.inputs)
    if (made.kind, truth) not in (("any", True), ("all", False)):
        return None
    return _infinite(made.inputs[0], truth, makers)


def _infinite(mask: Value, truth: bool, makers: Makers) -> Value | None:
    """The tensor of which ``mask`` is ``truth`` wherever it is infinite."""
    made = makers.get(plain(mask, makers))
    if made is None:
        return None
    if made.kind == "not":
        return _infinite(made.inputs[0], not truth, makers)
    if made.kind == "or" and truth:
        return _first(
            _infinite(v, truth, makers) for v in made.inputs if v.shape == made.output.shape
        )
    known = (made.kind, truth) in (("isinf", True), ("aten::isfinite", False))
    return plain(made.inputs[0], makers) if known else None


def _first(values: Iterable[Value | None]) -> Value | None:
    return next((value for value in values if value is not None), None)


def is_clamped(was: Any, now: Any, finite: Value, makers: Makers) -> bool:
    """Whether ``now`` is ``was`` where ``finite`` has no infinite number: it is a clamp of it."""
    if not isinstance(was, Value) or not isinstance(now, Value) or was.shape != now.shape:
        return False
    now = plain(now, makers)
    while now is not finite and (made := makers.get(now)) is not None and _is_wide(made):
        now = plain(made.inputs[0], makers)
    return now is finite and plain(was, makers) is finite


def _is_wide(made: Node) -> bool:
    """Whether it is a clamp that leaves every finite number as it is."""
    x = made.inputs[0] if made.kind == "clamp" else None
    if x is None or x.dtype not in _UNCHANGED_IN or made.output.dtype != x.dtype:
        return False
    limits = torch.finfo(getattr(torch, x.dtype))
    return made.attrs["min"] in (None, limits.min) and made.attrs["max"] in (None, limits.max)


def check_precision(places: Mapping[str, str], precision: str) -> None:
    """Raises `DataDependentError` where a program computes in a dtype in which the clamps at
    ``places``, taken down in the dtypes that these say, are others than the model's own would be.
    """
    if precision in _COMPUTED_IN:
        return
    for place, dtype in places.items():
        if dtype != precision:
            raise DataDependentError(
                f"{place} clamps a tensor where not all of it is finite. That runs at every step, "
                f"and with precision={precision!r} it may cut off finite numbers, which it does "
                f"not in {' and '.join(_COMPUTED_IN)}: say one of these, or compute both and "
                "choose with torch.where"
            )
