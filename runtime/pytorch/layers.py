"""What emitted programs call beside torch: idioms in one line, and a holder of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from autopar.runtime.pytorch import ranks
from autopar.runtime.pytorch.dropout import drawn_apart
from autopar.torch_private.modes import without_modes


def device() -> torch.device:
    """Where this process computes."""
    return ranks.current().device


class _Named(nn.Module):
    """Parts under their own names."""

    def __init__(self, /, **parts: nn.Module | nn.Parameter | nn.Buffer | None) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Weights(_Named):
    """The parameters and buffers of one layer under their own names; the caller computes."""


class Modules(_Named):
    """Modules, and tensors beside them, under their own names; the caller runs them."""


def repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """[b, g, t, d] -> [b, g * repeats, t, d], each head ``repeats`` times in a row."""
    b, g, t, d = x.shape
    return x[:, :, None].expand(b, g, repeats, t, d).reshape(b, g * repeats, t, d)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    axis: str | Sequence[str] = (),
    rows: str | Sequence[str] = (),
    order: str = "contiguous",
) -> Tensor:
    """``softmax(q k^T * scale + mask) v``: q [b, h, s, d], k and v [b, g, t, d], h = g * r.

    A boolean mask is true where a query may look, a float one is added; ``scale`` is by default
    ``1 / sqrt(d)``. Ranks along ``axis`` have pieces, and drop scores of their own. Of ranks along
    ``rows`` each has a piece of the queries, one behind the other or in zigzag ``order``: a causal
    mask shows them the keys up to their own places in the whole sequence.
    """
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(q.dtype)
    attend: Callable[..., Tensor] = partial(
        F.scaled_dot_product_attention, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    if dropout and axis:
        attend = partial(drawn_apart, axis, attend)
    if not causal or (not rows and mask is None):
        return attend(q, k, v, mask, dropout, causal)
    made = []
    firsts = _first_rows(q.shape[2], rows, order)
    for i, (part, first) in enumerate(zip(q.chunk(len(firsts), 2), firsts, strict=True)):
        last = first + part.shape[2]
        keys, values = k[:, :, :last], v[:, :, :last]
        hidden = mask
        if mask is not None and mask.shape[-2:-1] == q.shape[2:3]:
            hidden = mask.chunk(len(firsts), -2)[i]
        seen = _seen_from(first, part.shape[2], keys.shape[2], q.device, hidden)
        made.append(attend(part, keys, values, seen, dropout, False))
    return made[0] if len(made) == 1 else torch.cat(made, 2)


def _first_rows(length: int, rows: str | Sequence[str], order: str) -> list[int]:
    """Which row of the whole sequence each run of this rank's ``length`` rows begins with."""
    if not rows:
        return [0]
    axes = (rows,) if isinstance(rows, str) else rows
    rank, ways = ranks.current().index(*axes), ranks.current().mesh.ways(axes)
    if order == "zigzag":
        return [rank * length // 2, (2 * ways - 1 - rank) * length // 2]
    return [rank * length]


def _seen_from(
    first: int, rows: int, columns: int, device: torch.device, mask: Tensor | None
) -> Tensor:
    """What rows may see of the first ``columns``, the first one being row ``first`` of all.

    ``mask``: what else is hidden or added, of at least these columns, or alike for all.
    """
    last = mask is None and first + rows == columns
    if last and not torch.compiler.is_compiling():
        with without_modes():
            return causal_lower_right(rows, columns)  # kernels know this one, and hold no mask
    seen = torch.ones(rows, columns, dtype=torch.bool, device=device).tril(first)
    if mask is None:
        return seen
    if mask.shape[-1] > columns:
        mask = mask[..., :columns]
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -math.inf)


def scatter_sum(x: Tensor, index: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    """Zeros of ``shape`` to which x is added at the places along ``dim`` that ``index`` names.

    x and index have one shape, that of the result but for ``dim``.
    """
    return x.new_zeros(shape).scatter_add(dim, index, x)
