"""What emitted programs call beside torch: idioms in one line, and a holder of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from autopar.nouns.windows import strip_rows
from autopar.runtime.pytorch import ranks
from autopar.runtime.pytorch.attention_kernels import attended_by
from autopar.runtime.pytorch.dropout import drawn_apart
from autopar.runtime.pytorch.own_kernels import own_kernel, run_own
from autopar.runtime.pytorch.ring_attention import over_blocks
from autopar.runtime.pytorch.ring_blocks import Block
from autopar.runtime.shared.settings import ProgramError
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
    window: int | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    kernel: str = "",
) -> Tensor:
    """``softmax(q k^T * scale + mask) v``: q [b, h, s, d], k and v [b, g, t, d], h = g * r.

    A boolean mask is true where a query may look, a float one is added; ``scale`` is by default
    ``1 / sqrt(d)``. Ranks along ``axis`` have pieces, and drop scores of their own. Of ranks along
    ``rows`` each has a piece of the queries, one behind the other or in zigzag ``order``: a causal
    mask shows them the keys up to their own places in the whole sequence, and with ``window`` the
    last so many of these alone, strip by strip of the rows (`autopar.nouns.windows`). Of
    ``documents``, numbers of the rows [b, s] and of all columns [b, t], a row sees its own alone.
    ``sinks`` [h] are one more logit of each row, whose weight goes nowhere. ``kernel`` is that of
    torch's that a GPU runs it by (`autopar.runtime.pytorch.attention_kernels`), or a user's
    function of (q, k, v, causal, scale); empty: as torch has it.
    """
    if documents is not None or sinks is not None:
        if dropout:
            raise ProgramError("attention of documents or with sinks has no dropout")
        blocks = _blocks(q.shape[2], k.shape[2], causal, rows, order, window)
        mixed: Tensor = over_blocks(q, k, v, blocks, scale, mask, documents, sinks)
        return mixed
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(q.dtype)
    attend: Callable[..., Tensor] = partial(
        F.scaled_dot_product_attention, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    if dropout and axis:
        attend = partial(drawn_apart, axis, attend)
    if not causal or (not rows and mask is None and window is None):
        if ":" in kernel and (row := own_kernel("attention", kernel, q)) is not None:
            if mask is not None or dropout:
                raise ProgramError(f"the kernel {kernel} is called without a mask and dropout")
            shape = torch.Size((*q.shape[:3], v.shape[3]))
            return run_own(row, shape, q.dtype, q, k, v, causal, scale)
        with attended_by(kernel, q):
            return attend(q, k, v, mask, dropout, causal)
    strips = _runs(q.shape[2], k.shape[2], rows, order, window)
    return _in_strips(attend, q, k, v, mask, dropout, strips, window)


def _in_strips(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    strips: Iterable[tuple[slice, int]],
    window: int | None,
) -> Tensor:
    """Causal attention strip by strip of the rows, each over the keys that it sees; ``strips``:
    rows here, and the place of the first in the whole sequence."""
    made: list[Tensor] = []
    bands: dict[tuple[int, int], Tensor] = {}
    of_rows = mask is not None and mask.shape[-2:-1] == q.shape[2:3]
    for here, first in strips:
        last = first + here.stop - here.start
        start = 0 if window is None else max(0, first - window + 1)
        keys, values = k[:, :, start:last], v[:, :, start:last]
        band = first - start, here.stop - here.start
        if mask is None:
            if band not in bands:
                bands[band] = _band(*band, keys.shape[2], window, q)
            seen = bands[band]
        else:
            hidden = mask[..., here, :] if of_rows else mask
            hidden = hidden[..., start:last] if hidden.shape[-1] > 1 else hidden
            seen = _hidden_too(*band, keys.shape[2], window, hidden)
        made.append(attend(q[:, :, here], keys, values, seen, dropout, False))
    return made[0] if len(made) == 1 else torch.cat(made, 2)


def _runs(
    length: int, columns: int, rows: str | Sequence[str], order: str, window: int | None
) -> Iterator[tuple[slice, int]]:
    """Rows of this rank's ``length`` that are computed at a time, and which row of the whole
    sequence each run of them begins with."""
    firsts = [0]
    if rows:
        axes = (rows,) if isinstance(rows, str) else rows
        rank, ways = ranks.current().index(*axes), ranks.current().mesh.ways(axes)
        zigzag = [rank * length // 2, (2 * ways - 1 - rank) * length // 2]
        firsts = zigzag if order == "zigzag" else [rank * length]
    piece = length // len(firsts)
    strip = piece if window is None else strip_rows(window, columns)
    for i, first in enumerate(firsts):
        for ahead in range(0, piece, strip):
            begin, stop = i * piece + ahead, i * piece + min(ahead + strip, piece)
            yield slice(begin, stop), first + ahead


def _blocks(
    length: int,
    columns: int,
    causal: bool,
    rows: str | Sequence[str],
    order: str,
    window: int | None,
) -> list[Block]:
    """What this rank's rows see of all columns, by their places alone."""
    if not causal:
        return [Block((0, length), (0, columns))]
    made = []
    for here, first in _runs(length, columns, rows, order, window):
        own, stop = (here.start, here.stop), min(columns, first + here.stop - here.start)
        if window is not None:
            start = max(0, first - window + 1)
            made.append(Block(own, (start, stop), first - start, window))
            continue
        made += [Block(own, (0, first))] if first else []  # kernels know either without a mask
        made.append(Block(own, (first, stop), 0))
    return made


def _band(first: int, rows: int, columns: int, window: int | None, q: Tensor) -> Tensor:
    """What rows see of ``columns``, the first one being row ``first`` of these.

    A window's is added to scores, since a kernel would keep a copy of a boolean one for each call.
    """
    within = window is None or first + rows <= window
    if within and first + rows == columns and not torch.compiler.is_compiling():
        with without_modes():
            return causal_lower_right(rows, columns)  # kernels know this one, and hold no mask
    seen = _seen(first, rows, columns, window, q.device)
    return seen if window is None else q.new_zeros(seen.shape).masked_fill_(~seen, -math.inf)


def _hidden_too(first: int, rows: int, columns: int, window: int | None, mask: Tensor) -> Tensor:
    """`_band` under a mask, of these columns or alike for all."""
    seen = _seen(first, rows, columns, window, mask.device)
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -math.inf)


def _seen(first: int, rows: int, columns: int, window: int | None, device: torch.device) -> Tensor:
    seen = torch.ones(rows, columns, dtype=torch.bool, device=device).tril(first)
    return seen if window is None else seen.triu(first - window + 1)


def scatter_sum(x: Tensor, index: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    """Zeros of ``shape`` to which x is added at the places along ``dim`` that ``index`` names.

    x and index have one shape, that of the result but for ``dim``.
    """
    return x.new_zeros(shape).scatter_add(dim, index, x)
