"""The experts of a layer: every token goes through the few that its route names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.pytorch.accelerators import multiplies_groups


@torch.compiler.disable  # type: ignore[untyped-decorator]
def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    gate: Callable[..., Tensor],
    reads: str = "halves",
    transposed: bool = False,
) -> Tensor:
    """``sum_k weights[n, k] * (gate(x[n] up[e]^T + up_bias[e]) down[e]^T + down_bias[e])`` for
    each token n, with ``e = index[n, k]``.

    x [n, d], index [n, k] of integers below e, weights [n, k], up [e, g, d], down [e, d, f],
    up_bias [e, g], down_bias [e, d] -> [n, d] in the dtype of x.

    gate:       from [rows, g] to [rows, f], element by element. Where it ``reads`` "all" it is
                called with the whole; with "halves" (g = 2 f) with its two halves, with "pairs"
                with its even and its odd entries. It may compute in a wider dtype.
    transposed: matrices are up [e, d, g] and down [e, f, d].

    Tokens are put in order of their experts, each of which multiplies its own in one product. All
    matrices get a gradient, of zeros where no token came: ranks add up their gradients, and what is
    not used on one may be on another.
    """
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    rows = flat.new_zeros(up.shape[0]).scatter_add(0, flat, torch.ones_like(flat))
    h = _products(x[order // index.shape[1]], rows, up, up_bias, transposed)
    h = gate(*_parts(h, reads)).to(x.dtype)
    h = _products(h, rows, down, down_bias, transposed)
    h = h * weights.reshape(-1)[order].unsqueeze(-1)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return h[place].view(*index.shape, h.shape[1]).sum(1).to(x.dtype)


def _parts(h: Tensor, reads: str) -> Sequence[Tensor]:
    if reads == "all":
        return (h,)
    return h.chunk(2, dim=-1) if reads == "halves" else (h[:, 0::2], h[:, 1::2])


def _products(
    x: Tensor, rows: Tensor, matrices: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    """The first ``rows[0]`` rows of x [s, i] times the first matrix [o, i], and so on: [s, o]."""
    if not _has_kernel(x, matrices):
        # Without values, as if all routes named the first.
        numbers = [len(x), *[0] * (len(rows) - 1)] if rows.is_meta else rows.tolist()
        return one_by_one(x, numbers, matrices, bias, transposed)
    return _at_once(x, rows, matrices, bias, transposed)


def _has_kernel(x: Tensor, matrices: Tensor) -> bool:
    """Whether torch's kernel for products of groups takes them: on GPUs from Ampere on, in
    bfloat16, where rows and matrices begin at multiples of 16 bytes."""
    alike = x.dtype is matrices.dtype is torch.bfloat16 and len(x) > 0
    aligned = all(n % 8 == 0 for n in matrices.shape[1:])
    return alike and aligned and multiplies_groups(x.device)


def _at_once(
    x: Tensor, rows: Tensor, matrices: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    """`one_by_one` in one kernel; the host does not wait for the numbers of rows."""
    ends = rows.cumsum(0, dtype=torch.int32)
    made = F.grouped_mm(x, matrices if transposed else matrices.transpose(1, 2), offs=ends)
    if bias is None:
        return made
    which = torch.arange(len(rows), device=x.device)
    return made + bias[which.repeat_interleave(rows, output_size=len(x))]


def one_by_one(
    x: Tensor, rows: Sequence[int], matrices: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    """A product for each matrix that has rows.

    Matrices that multiply nothing come into the gradient as zeros, by `unbind`, as long as one
    multiplies something: the first does where there are no rows.
    """
    each = matrices.unbind()
    added = [None] * len(each) if bias is None else bias.unbind()
    used = [i for i, n in enumerate(rows) if n] or [0]
    parts = torch.split(x, [rows[i] for i in used])
    made = [
        F.linear(part, each[i].t() if transposed else each[i], added[i])
        for i, part in zip(used, parts, strict=True)
    ]
    return torch.cat(made)
