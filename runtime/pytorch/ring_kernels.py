"""Attention of a block of rows against a block of columns, and its way into the whole.

A part of a row's softmax is known by three numbers that add up to the whole whatever the order
(Milakov and Gimelshein, arXiv:1805.02867): ``summed`` = sum exp(score - top) v, ``top``, a score
that none is far above, and ``total`` = sum exp(score - top). A kernel that gives its result and the
log-sum-exp of its scores gives them too: the result, the log-sum-exp, and 1.

All of them are float32, or float64 where queries are. Rows that see nothing have top -inf and total
0; their result is 0, as `F.scaled_dot_product_attention` has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.pytorch.ring_blocks import Block
from autopar.torch_private.ops import flash_backward, flash_cpu, flash_cpu_backward, flash_forward

SCORES = 1 << 22
"""Scores that products and a softmax hold at a time, rows by rows."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are added up in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(slots=True)
class Softmax:
    """Rows of a softmax times values, of the columns that came so far."""

    summed: Tensor
    """[b, h, s, e]"""
    top: Tensor
    """[b, h, s]"""
    total: Tensor
    """[b, h, s]"""

    @classmethod
    def of_nothing(cls, q: Tensor, v: Tensor) -> Softmax:
        shape = q.shape[:3]
        summed = q.new_zeros((*shape, v.shape[3]), dtype=wide(q.dtype))
        return cls(summed, summed.new_full(shape, -math.inf), summed.new_zeros(shape))

    @classmethod
    def of_sinks(cls, sinks: Tensor, rows: Softmax) -> Softmax:
        """One more column of all ``rows``, with a logit for each head and nothing to add up."""
        top = sinks.to(rows.top.dtype)[:, None].expand_as(rows.top)
        return cls(torch.zeros_like(rows.summed), top, torch.ones_like(rows.total))

    def add(self, rows: tuple[int, int], part: Softmax) -> None:
        """Further columns of some rows."""
        here = (slice(None), slice(None), slice(*rows))
        top = torch.maximum(self.top[here], part.top)
        finite = _shown(top)
        before, now = (self.top[here] - finite).exp(), (part.top - finite).exp()
        self.summed[here] = self.summed[here] * before[..., None] + part.summed * now[..., None]
        self.total[here] = self.total[here] * before + part.total * now
        self.top[here] = top

    def result(self) -> Tensor:
        return self.summed / _not_zero(self.total)[..., None]

    def normalizer(self, apart: bool) -> tuple[Tensor, Tensor | None]:
        """(top, total) with which ``exp(score - top) / total`` are the probabilities; both in one,
        the log-sum-exp, unless ``apart``: under a mask of the lowest float, top is so large that
        the logarithm of a total added to it would be lost."""
        top, total = _shown(self.top), _not_zero(self.total)
        return (top, total) if apart else (top + total.log(), None)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of a block; what is ``mask``'s has the shape of the slice that the block was given."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, block: Block, scale: float
) -> Softmax:
    """q, k, v and ``mask`` [b or 1, h or 1, rows or 1, columns] of the block alone."""
    if not _has_flash(q, v, mask, block):
        return _written_out(q, k, v, _seen(mask, block, q.device), scale)
    if q.device.type == "cuda":
        out, lse = flash_forward(q, k, v, 0.0, block.aligned, scale=scale)[:2]
    else:
        bias, causal = _flash_mask(q, mask, block)
        out, lse = flash_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        if bias is not None:  # the kernel says 0 of rows that see nothing
            lse = lse.masked_fill((bias == -math.inf).all(-1), -math.inf)
    return Softmax(out.to(wide(q.dtype)), lse, torch.ones_like(lse))


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    top: Tensor,
    total: Tensor | None,
    block: Block,
    scale: float,
    mask_wanted: bool = False,
) -> Gradients:
    """What the block adds to the gradients, with the result and the normalizer of whole rows."""
    if not _has_flash(q, v, mask, block):
        seen = _seen(mask, block, q.device)
        shape = None if mask is None or not mask_wanted else mask.shape
        return _written_out_backward(grad, q, k, v, seen, out, top, total, scale, shape)
    if q.device.type == "cuda":
        return Gradients(*_flash_cuda_backward(grad, q, k, v, out, top, block, scale))
    bias, causal = _flash_mask(q, mask, block)
    return Gradients(
        *flash_cpu_backward(grad, q, k, v, out, top, 0.0, causal, attn_mask=bias, scale=scale)
    )


def _has_flash(q: Tensor, v: Tensor, mask: Tensor | None, block: Block) -> bool:
    """Whether torch has a kernel there that gives the log-sum-exp.

    On the CPU: of any float dtype, with values as wide as keys. A float mask is none of its own: it
    may be trained, and may hold lowest floats (`Softmax.normalizer`). On CUDA: of half precision,
    a width up to 256 that 8 divides, without any mask but the causal one (torch's
    ``sdp_utils.cpp``, check_flash_attention_hardware_support and its neighbours; not tried here).
    """
    if q.shape[3] != v.shape[3] or (mask is not None and mask.dtype is not torch.bool):
        return False
    if q.device.type != "cuda":
        return q.device.type in ("cpu", "meta")
    low = q.dtype in (torch.float16, torch.bfloat16)
    plain = mask is None and (block.offset is None or block.aligned)
    return low and plain and q.shape[3] % 8 == 0 and q.shape[3] <= 256


def _flash_cuda_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    scale: Any,
) -> Any:
    """Without dropout the random state is not read, so any will do."""
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    lse = lse.contiguous()
    return flash_backward(
        grad, q, k, v, out, lse, None, None, block.height, block.width, 0.0, block.aligned, seed,
        offset, scale=scale,
    )  # fmt: skip


def _flash_mask(q: Tensor, mask: Tensor | None, block: Block) -> tuple[Tensor | None, bool]:
    """What the CPU's kernel is given, in the dtype of queries, and its causal flag."""
    if mask is None and (block.offset is None or block.aligned):
        return None, block.aligned
    seen = _seen(mask, block, q.device)
    assert seen is not None
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
    return bias.masked_fill(~seen, -math.inf), False


def _seen(mask: Tensor | None, block: Block, device: torch.device) -> Tensor | None:
    """``mask`` together with what the block itself hides; None where all is seen."""
    if block.offset is None:
        return mask
    rows = torch.arange(block.height, device=device)[:, None] + block.offset
    columns = torch.arange(block.width, device=device)
    seen = columns <= rows
    if block.window is not None:
        seen = seen & (columns > rows - block.window)
    if mask is None:
        return seen
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -math.inf)


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Softmax:
    """Products and a softmax, some rows at a time."""
    k, v = k.to(wide(q.dtype)), v.to(wide(q.dtype))
    parts = []
    for rows in _portions(q, k):
        scores = _scores(q[:, :, rows], k, _rows_of(mask, rows), scale)
        top = scores.amax(-1)
        weights = (scores - _shown(top)[..., None]).exp()
        summed = (_by_group(weights, k) @ v).view(*top.shape, v.shape[3])
        parts.append((summed, top, weights.sum(-1)))
    return Softmax(*(torch.cat(each, 2) for each in zip(*parts, strict=True)))


def _written_out_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    top: Tensor,
    total: Tensor | None,
    scale: float,
    mask_shape: torch.Size | None,
) -> Gradients:
    """``mask_shape``: of the mask before a block's own was added; None without gradient."""
    k, v = k.to(wide(q.dtype)), v.to(wide(q.dtype))
    dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    added = None if mask_shape is None else k.new_zeros(mask_shape)
    for rows in _portions(q, k):
        here, g = q[:, :, rows].to(k.dtype), grad[:, :, rows].to(k.dtype)
        scores = _scores(here, k, _rows_of(mask, rows), scale)
        weights = (scores - top[:, :, rows, None]).exp()
        if total is not None:
            weights = weights / total[:, :, rows, None]
        inner = (g * out[:, :, rows]).sum(-1, keepdim=True)
        ds = weights * ((_by_group(g, k) @ v.mT).view_as(weights) - inner)
        if added is not None:
            part = added if added.shape[2] == 1 else added[:, :, rows]
            part += ds.sum_to_size(part.shape)
        ds = _by_group(ds, k)
        dq.append((ds @ k).view_as(here) * scale)
        dk += ds.mT @ _by_group(here, k) * scale
        dv += _by_group(weights, k).mT @ _by_group(g, k)
    return Gradients(torch.cat(dq, 2), dk, dv, added)


def _portions(q: Tensor, k: Tensor) -> Iterator[slice]:
    step = max(1, SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for first in range(0, q.shape[2], step):
        yield slice(first, min(first + step, q.shape[2]))


def _rows_of(mask: Tensor | None, rows: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[b, h, s, t] of q [b, h, s, d] and k [b, g, t, d] in the dtype of k."""
    scores = _by_group(q.to(k.dtype), k) @ k.mT * scale
    scores = scores.view(*q.shape[:3], k.shape[2])
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    """[b, g r, s, n] -> [b, g, r s, n]: the heads that share keys lie one below the other."""
    b, h, s, n = x.shape
    return x.reshape(b, k.shape[1], h // k.shape[1] * s, n)


def _shown(top: Tensor) -> Tensor:
    """``top``, and 0 for -inf, which can be subtracted."""
    return top.masked_fill(top == -math.inf, 0.0)


def _not_zero(total: Tensor) -> Tensor:
    return total.masked_fill(total == 0, 1.0)
