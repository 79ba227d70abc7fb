"""Optimizers by the name that workloads and plans have for them.

``adamw`` and ``sgd`` are the plan's own. ``own:1`` is one of the user's script, which keeps one
number for each of a parameter's (momentum), ``own:0.03`` one that keeps little (factored moments).
"""

from __future__ import annotations

import re

OPTIMIZERS = ("adamw", "sgd")
_STATE = {"adamw": 2.0, "sgd": 0.0}
_OWN = re.compile(r"own:(\d+(?:\.\d+)?)")


def own_name(state: float) -> str:
    """The name of an optimizer of the user's that keeps ``state`` bytes for each of a parameter."""
    return f"own:{state:.3f}".rstrip("0").rstrip(".")


def is_own(optimizer: str) -> bool:
    return _OWN.fullmatch(optimizer) is not None


def is_known(optimizer: str) -> bool:
    return optimizer in OPTIMIZERS or is_own(optimizer)


def state_per_parameter(optimizer: str) -> float:
    """Bytes of state for each byte of a parameter."""
    named = _OWN.fullmatch(optimizer)
    return _STATE[optimizer] if named is None else float(named[1])
