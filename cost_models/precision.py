"""What a precision means: a dtype, with what a source adds to its name ('bf16 (amp)')."""

from __future__ import annotations

import re
from functools import cache

from autopar.nouns.cluster import short_dtype

NARROW = ("fp8", "fp4", "int8")


@cache
def compute_dtype(precision: str) -> str:
    """The dtype of the matrix products: 'fp8' of 'fp8-current-scaling', 'bf16' of 'bf16 (amp)'."""
    return short_dtype(re.split(r"[^a-z0-9]", precision.strip().lower(), maxsplit=1)[0])


def is_narrow(precision: str) -> bool:
    """Whether operands of products are converted to 8 bits or fewer; all else keeps 16."""
    return compute_dtype(precision) in NARROW


def wide_dtype(precision: str) -> str:
    """The dtype of attention and of the loss's products, which are not done in 8 bits or fewer."""
    return "bf16" if is_narrow(precision) else compute_dtype(precision)


def stream_bytes(precision: str) -> int:
    """Bytes of one activation between products; parameters are as wide where they are used."""
    return {"fp64": 8, "fp32": 4, "tf32": 4}.get(compute_dtype(precision), 2)
