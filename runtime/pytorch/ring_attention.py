"""Attention whose keys and values go around a ring of ranks, each with a piece of the sequence.

Ring attention (Liu et al., arXiv:2310.01889): a rank computes its queries against the piece of keys
and values that it holds, while it sends that piece on and the next one comes. Results are merged by
their log-sum-exp. In backward keys and values go around again, and behind each piece the sum of its
gradients, as far as its own rank. `ring_blocks` says what is computed of each piece and how many
bytes move; `ring_kernels` computes a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autopar.runtime.pytorch import ranks, transport
from autopar.runtime.pytorch.collectives import apply
from autopar.runtime.pytorch.ring_agreement import check_same_shapes
from autopar.runtime.pytorch.ring_blocks import ORDERS, Block, Order, blocks, rounds, sources
from autopar.runtime.pytorch.ring_kernels import Softmax, backward, forward, wide
from autopar.runtime.pytorch.ring_results import Result, computed
from autopar.runtime.pytorch.zigzag import to_zigzag
from autopar.runtime.shared.settings import ProgramError


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    *,
    ring: str | Sequence[str],
    order: str = "contiguous",
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """This rank's rows of ``softmax(q k^T * scale + mask) v`` over whole sequences that n ranks
    along ``ring`` have in equal pieces.

    q [b, h, s/n, d], k [b, g, t/n, d], v [b, g, t/n, e] with h = g * r -> [b, h, s/n, e].

    mask:   [.., s/n or 1, t or 1], of this rank's rows, and of all columns in their own order;
            boolean, true where a query may look, or added. Its gradient is of this
            rank's rows alone: a partial sum where the rows share one.
    causal: row i sees columns up to i; with ``window`` those after i - window alone. Where the rows
            and columns of the pieces stand is ``order``: ``contiguous`` or ``zigzag`` (chunks i and
            2n - 1 - i of 2n on rank i, which gives all ranks the same work).
    ring:   an axis, or axes, outermost first, of which the last should join near ranks. An axis of
            one rank moves nothing.

    Forward sends (k, v) n - 1 times; backward sends (k, v) and their gradients as often; all as
    ``shift``s, each issued before the block that hides it. Kept for backward: q, k, v, the result
    and the log-sum-exp. Raises `ProgramError` for what it cannot do.

    Never compiled: graphs end before and begin after it. In a graph, equal collectives become one,
    so that the pieces which forward received would be kept for backward, and one whose result a
    rank does not use is dropped: rank 0 sees nothing of later pieces, and the others would wait.
    """
    axes = tuple(a for a in ((ring,) if isinstance(ring, str) else ring) if transport.size(a) > 1)
    ways = tuple(transport.size(a) for a in axes)
    _check(q, k, v, mask, causal, math.prod(ways), order, window, dropout)
    check_same_shapes(axes, q, k, v)
    if mask is not None:
        mask = mask if mask.dtype is torch.bool else mask.to(q.dtype)
        mask = mask.view(*[1] * (4 - mask.dim()), *mask.shape)
        mask = mask.expand(*mask.shape[:3], k.shape[2] * math.prod(ways))
        mask = to_zigzag(mask, 3, math.prod(ways)) if order == "zigzag" else mask
    course = Course.of(axes, ways, (q.shape[2], k.shape[2]), cast(Order, order), causal, window)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    result: Tensor = apply(_Ring, q, k, v, mask, course, scale)
    return result


@dataclass(frozen=True, slots=True)
class Course:
    """How pieces come around to this rank."""

    axes: tuple[str, ...]
    around: tuple[int, ...]
    """Pieces that it holds along each axis."""
    steps: tuple[tuple[int, tuple[Block, ...]], ...]
    """Each piece in its turn: where its columns begin, and what is computed of it."""

    @classmethod
    def of(
        cls,
        axes: tuple[str, ...],
        ways: tuple[int, ...],
        lengths: tuple[int, int],
        order: Order,
        causal: bool,
        window: int | None,
    ) -> Course:
        here = ranks.current().index(*axes)
        around = rounds(ways, lengths[0], order, causal, window)
        first = [lengths[1] * piece for piece in sources(here, ways, around)]
        seen = blocks(here, ways, *lengths, order, causal, window)
        return cls(axes, around, tuple(zip(first, seen, strict=True)))


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, course: Course, scale: float
    ) -> Tensor:
        out, top, total = computed(lambda: _forward(q, k, v, mask, course, scale))
        assert out is not None
        out = out.detach()  # which may be kept elsewhere, by itself
        ctx.save_for_backward(q, k, v, mask, out, top, total)
        ctx.course, ctx.scale = course, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, mask, out, top, total = ctx.saved_tensors
        course: Course = ctx.course
        mask_wanted = ctx.needs_input_grad[3]
        pair_wanted = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        grad = grad.contiguous()
        dq = torch.zeros_like(q, dtype=wide(q.dtype))
        added = torch.zeros(mask.shape, dtype=dq.dtype, device=q.device) if mask_wanted else None
        steps = iter(course.steps)

        def visit(pair: Tensor) -> Tensor:
            keys, values = _apart(pair, k, v)
            sums = torch.zeros_like(pair, dtype=wide(q.dtype))
            dk, dv = _apart(sums, k, v)
            first, seen = next(steps)
            for block in seen:
                part = backward(
                    _rows(grad, block),
                    _rows(q, block),
                    _columns(keys, block),
                    _columns(values, block),
                    _of_mask(mask, block, first),
                    _rows(out, block),
                    _rows(top, block),
                    None if total is None else _rows(total, block),
                    block,
                    ctx.scale,
                    mask_wanted,
                )
                _rows(dq, block).add_(part.q)
                _columns(dk, block).add_(part.k)
                _columns(dv, block).add_(part.v)
                if added is not None:
                    _of_mask(added, block, first).add_(part.mask)
            return sums

        where = (_joined(k, v), course.axes, course.around)
        dk, dv = None, None
        if pair_wanted:
            dk, dv = _apart(_there_and_back(*where, visit), k, v)
        else:
            _around(*where, visit)
        grads = [(dq, q), (dk, k), (dv, v), (added, mask)]
        return *[None if g is None else g.to(x.dtype) for g, x in grads], None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, course: Course, scale: float
) -> Result:
    """The result, and by what a row's probabilities are made of its scores again."""
    softmax = Softmax.of_nothing(q, v)
    steps = iter(course.steps)

    def visit(pair: Tensor) -> None:
        keys, values = _apart(pair, k, v)
        first, seen = next(steps)
        for block in seen:
            operands = _rows(q, block), _columns(keys, block), _columns(values, block)
            hidden = _of_mask(mask, block, first)
            softmax.add(block.rows, forward(*operands, hidden, block, scale))

    _around(_joined(k, v), course.axes, course.around, visit)
    apart = mask is not None and mask.dtype is not torch.bool
    return softmax.result().to(q.dtype), *softmax.normalizer(apart)


def _around(
    pair: Tensor, axes: Sequence[str], around: Sequence[int], visit: Callable[[Tensor], object]
) -> None:
    """``visit`` of each piece, this rank's own first, while the next one comes."""
    if not axes:
        visit(pair)
        return
    for back in range(around[0]):
        more = back + 1 < around[0]
        coming = transport.begin_shift(pair, axes[0]) if more else None
        _around(pair, axes[1:], around[1:], visit)
        if coming is not None:
            pair = transport.wait(coming)


def _there_and_back(
    pair: Tensor, axes: Sequence[str], around: Sequence[int], visit: Callable[[Tensor], Tensor]
) -> Tensor:
    """`_around`, where ``visit`` returns this rank's part of its piece's gradient: the sum of all
    ranks' parts for the own piece.

    The sum for a piece begins on the rank after its own, follows the piece, and goes home from the
    last one that sees it.
    """
    if not axes:
        return visit(pair)
    axis = axes[0]
    own: Tensor | None = None
    behind: Tensor | None = None
    for back in range(around[0]):
        more = back + 1 < around[0]
        coming = transport.begin_shift(pair, axis) if more else None
        part = _there_and_back(pair, axes[1:], around[1:], visit)
        if back == 0:
            own = part
        else:
            if behind is not None:
                part = part + transport.wait(behind)
            behind = transport.begin_shift(part, axis, 1 if more else -back)
        if coming is not None:
            pair = transport.wait(coming)
    assert own is not None
    return own if behind is None else own + transport.wait(behind)


def _joined(k: Tensor, v: Tensor) -> Tensor:
    """Both in one flat tensor, which one shift sends."""
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _apart(pair: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a flat tensor in the shapes of ``k`` and ``v``."""
    return pair[: k.numel()].view(k.shape), pair[k.numel() :].view(v.shape)


def _rows(x: Tensor, block: Block) -> Tensor:
    return x[:, :, slice(*block.rows)]


def _columns(x: Tensor, block: Block) -> Tensor:
    return x[:, :, slice(*block.columns)]


def _of_mask(mask: Any, block: Block, first: int) -> Any:
    """A view of what a mask says of a block whose piece begins with column ``first`` of all."""
    if mask is None:
        return None
    rows = slice(None) if mask.shape[2] == 1 else slice(*block.rows)
    return mask[:, :, rows, first + block.columns[0] : first + block.columns[1]]


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    n: int,
    order: str,
    window: int | None,
    dropout: float,
) -> None:
    """Raises `ProgramError` for what it cannot do, with what to do instead."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    wrong = None
    if dropout:
        wrong = (
            f"dropout={dropout:g}: ring attention cannot drop scores; train with dropout 0, or "
            "split attention by heads or by rows of queries alone"
        )
    elif not q.dtype == k.dtype == v.dtype:
        wrong = f"q is {q.dtype}, k {k.dtype} and v {v.dtype}: cast them to one dtype"
    elif k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        wrong = f"{shapes}: keys and values are pieces of equal length, as wide as queries are"
    elif q.shape[1] % k.shape[1]:
        wrong = f"{shapes}: heads of queries are a multiple of those of keys"
    elif order not in ORDERS:
        wrong = f"order={order!r}: write one of {', '.join(ORDERS)}"
    elif window is not None and (not causal or window < 1):
        wrong = f"window={window} with causal={causal}: a window has causal=True and 1 row or more"
    elif causal and q.shape[2] != k.shape[2]:
        wrong = f"{shapes}: a causal mask needs pieces of queries and keys of one length"
    elif causal and order == "zigzag" and q.shape[2] % 2:
        wrong = (
            f"{shapes}: zigzag pieces are two chunks of one length, and {q.shape[2]} is odd; take "
            f"a sequence that {2 * n} divides, or order='contiguous'"
        )
    elif mask is not None:
        wrong = _wrong_mask(q, k, mask, n)
    if wrong is not None:
        raise ProgramError(f"ring attention over {n} ranks: {wrong}")


def _wrong_mask(q: Tensor, k: Tensor, mask: Tensor, n: int) -> str | None:
    whole = (q.shape[0], q.shape[1], q.shape[2], n * k.shape[2])
    fits = 2 <= mask.dim() <= 4 and all(
        size in (1, wanted)
        for size, wanted in zip(reversed(mask.shape), reversed(whole), strict=False)
    )
    if fits:
        return None
    return (
        f"a mask {list(mask.shape)} is not one of {list(whole)} or of 1 in their place: it holds "
        f"this rank's rows and all columns, those of {n} equal pieces"
    )
