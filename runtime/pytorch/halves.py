"""Columns of a product whose matrix has all gates before all that they gate, cut contiguously.

With u columns of either to each of n ranks, the whole is 2 n runs of u columns: run m < n is gate
run m, run n + m what it gates. Rank i computes runs 2 i and 2 i + 1, and goes on with runs i and
n + i: every rank sends its two runs to the two ranks that go on with them, in one all-to-all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.dispatch import Axes
from autopar.runtime.pytorch.travelling import Exchange, exchange_rows
from autopar.runtime.shared.settings import ProgramError


def traded(h: Tensor, halves: Axes, counted: int) -> Tensor:
    """h [r, 2 u], columns 2 i u to 2 (i + 1) u of the whole on rank i -> [r, 2 u], its gates and
    what they gate. Every rank has the same rows, and calls, also without any.

    counted: rows that this counts as, see `autopar.runtime.pytorch.dispatch`.
    """
    (axis,) = (halves,) if isinstance(halves, str) else halves
    ways, here = transport.size(axis), transport.index(axis)
    if ways == 1:
        return h
    if h.shape[1] % 2:
        raise ProgramError(
            f"experts: halves={axis!r} gives a rank {h.shape[1]} columns, and it needs as many of "
            "gates as of what they gate: plan the model again"
        )
    rows, runs = len(h), h.chunk(2, dim=1)
    to = [(2 * here + k) % ways for k in (0, 1)]
    order = (0, 1) if to[0] < to[1] else (1, 0)
    sent, received = [0] * ways, [0] * ways
    for rank in to:
        sent[rank] = rows
    for run in (here, ways + here):
        received[run // 2] += rows
    stacked = torch.cat([runs[k] for k in order])
    came = exchange_rows(stacked, Exchange(tuple(sent), tuple(received), axis, 2 * counted))
    return torch.cat(came.view(2, rows, -1 if rows else h.shape[1] // 2).unbind(), dim=1)
