"""The experts of a layer: every token goes through the few that its route names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


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
                with its even and its odd entries.
    transposed: matrices are up [e, d, g] and down [e, f, d].

    Tokens are put in order of their experts, each of which multiplies its own in one product. All
    matrices get a gradient, of zeros where no token came: ranks add up their gradients, and what is
    not used on one may be on another. Raises IndexError where a route names no expert.
    """
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    rows = _rows(flat, up.shape[0])
    h = _products(x[order // index.shape[1]], rows, up, up_bias, transposed)
    h = _products(gate(*_parts(h, reads)), rows, down, down_bias, transposed)
    h = h * weights.reshape(-1)[order].unsqueeze(-1)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return h[place].view(*index.shape, h.shape[1]).sum(1).to(x.dtype)


def _rows(flat: Tensor, count: int) -> list[int]:
    """How many routes name each of ``count`` experts; without values, as if all named the first."""
    if flat.is_meta:
        return [len(flat), *[0] * (count - 1)]
    rows: list[int] = torch.bincount(flat, minlength=count).tolist()
    if len(rows) > count:
        raise IndexError(f"a route names expert {len(rows) - 1}, and there are {count}")
    return rows


def _parts(h: Tensor, reads: str) -> Sequence[Tensor]:
    if reads == "all":
        return (h,)
    return h.chunk(2, dim=-1) if reads == "halves" else (h[:, 0::2], h[:, 1::2])


def _products(
    x: Tensor, rows: Sequence[int], matrices: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    """The first ``rows[0]`` rows of x [s, i] times the first matrix [o, i], and so on: [s, o].

    Matrices that multiply nothing come into the gradient as zeros, by `unbind`, as long as one of
    them multiplies something: the first does where there are no rows.
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
