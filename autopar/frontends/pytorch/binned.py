"""How often each number comes up, ``torch.bincount(x, minlength=n)``, as a sum of one-hot rows.

What torch gives is as long as the largest number says, which only a batch knows; where numbers are
those of n bins, as experts and classes are, it is n. A number that is too large is an error of
`one_hot` then, in the program as in the capture's own run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

COUNTING: tuple[Any, ...] = (torch.bincount, torch.Tensor.bincount)


def in_bins(func: Any, args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any] | None:
    """The call that takes the place of one that counts into a known number of bins."""
    if func not in COUNTING:
        return None
    given = dict(zip(("input", "weights", "minlength"), args, strict=False)) | (kwargs or {})
    x, bins = given.get("input", args[0] if args else None), given.get("minlength", 0)
    if not isinstance(bins, int) or bins < 1 or not isinstance(x, torch.Tensor) or x.dim() != 1:
        return None
    return bincount, (x, given.get("weights"), bins)


def bincount(x: torch.Tensor, weights: torch.Tensor | None, bins: int) -> torch.Tensor:
    """[rows], [rows] -> [bins], in the dtypes that torch gives."""
    hot = F.one_hot(x.long(), bins)
    if weights is None:
        return hot.sum(0)
    dtype = weights.dtype if weights.dtype == torch.float32 else torch.float64
    return (hot.to(dtype) * weights.to(dtype).unsqueeze(1)).sum(0)
