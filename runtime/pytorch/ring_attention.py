"""Attention whose keys and values go around a ring of ranks, each with a piece of the sequence.

Ring attention (Liu et al., arXiv:2310.01889): a rank computes its queries against the piece of keys
and values that it holds, while it sends that piece on and the next one comes. Results are merged by
their log-sum-exp. In backward keys and values go around again, and behind each piece the sum of its
gradients, as far as its own rank. `ring_blocks` says what is computed of each piece and how many
bytes move; `ring_passing` moves them, `ring_kernels` computes a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.collectives import apply
from autopar.runtime.pytorch.ring_agreement import check_same_shapes
from autopar.runtime.pytorch.ring_blocks import Block, Order
from autopar.runtime.pytorch.ring_checks import check, check_documents
from autopar.runtime.pytorch.ring_course import Course
from autopar.runtime.pytorch.ring_kernels import Softmax, backward, forward, wide
from autopar.runtime.pytorch.ring_masks import (
    Beside,
    columns_of,
    expanded,
    hidden_by,
    of_mask,
    rows_of,
)
from autopar.runtime.pytorch.ring_passing import Carrier, Passing, joined, taken_apart
from autopar.runtime.pytorch.ring_results import Result, computed
from autopar.runtime.pytorch.zigzag import to_zigzag


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
    documents: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """This rank's rows of ``softmax(q k^T * scale + mask) v`` over whole sequences that n ranks
    along ``ring`` have in equal pieces.

    q [b, h, s/n, d], k [b, g, t/n, d], v [b, g, t/n, e] with h = g * r -> [b, h, s/n, e].

    mask:   [.., s/n or 1, t or 1], of this rank's rows, and of all columns in their own order;
            boolean, true where a query may look, or added. Its gradient is of these rows alone.
    causal: row i sees columns up to i; with ``window`` those after i - window alone. Where the rows
            and columns of the pieces stand is ``order``: ``contiguous`` or ``zigzag`` (chunks i and
            2n - 1 - i of 2n on rank i, which gives all ranks the same work).
    documents: numbers of this rank's rows [b, s/n] and of all columns [b, t] in their own order; a
            row sees columns of its own number alone. Only what some row sees is computed.
    sinks:  [h], one more logit of each row, whose weight goes nowhere. Its gradient is of this
            rank's rows alone.
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
    check(q, k, v, mask, causal, math.prod(ways), order, window, dropout)
    check_documents(q, k, mask, documents, math.prod(ways))
    check_same_shapes(axes, q, k, v)
    if mask is not None:
        mask = expanded(mask, q, k.shape[2] * math.prod(ways))
        mask = to_zigzag(mask, 3, math.prod(ways)) if order == "zigzag" else mask
    course = Course.of(axes, ways, (q.shape[2], k.shape[2]), cast(Order, order), causal, window)
    if documents is not None and order == "zigzag":
        documents = documents[0], to_zigzag(documents[1], 1, math.prod(ways))
    carrier = Passing(course.axes, course.around)
    return against(carrier, course, q, k, v, mask, scale, documents, sinks)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def over_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[Block],
    scale: float | None,
    mask: Tensor | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Rows of ``softmax(q k^T * scale + mask) v`` against whole keys and values, as far as their
    documents and ``blocks`` show them; see `ring_attention` for the rest."""
    check_documents(q, k, mask, documents, 1)
    course = Course((), (), ((0, tuple(blocks)),))
    mask = None if mask is None else expanded(mask, q, k.shape[2])
    return against(Passing((), ()), course, q, k, v, mask, scale, documents, sinks)


def against(
    carrier: Carrier,
    course: Course,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    documents: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
) -> Tensor:
    """Rows against the pieces of keys and values that a ``carrier`` has, in the order of
    ``course``, in which columns of an `expanded` ``mask`` and of ``documents`` lie too; see
    `ring_attention` for the rest, which is checked."""
    own, every = documents or (None, None)
    if own is not None and every is not None:
        course = course.within(own, every, k.shape[2])
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return _computed(q, k, v, Beside(mask, own, every, sinks), course, scale, carrier)


def _computed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beside: Beside,
    course: Course,
    scale: float,
    carrier: Carrier,
) -> Tensor:
    *hidden, sinks = beside
    held = None if sinks is None else sinks.detach()
    out, lost = apply(_Ring, q, k, v, *hidden, held, course, scale, carrier)
    return cast(Tensor, out if sinks is None else apply(_Sinks, out, sinks, lost))


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        own: Tensor | None,
        every: Tensor | None,
        sinks: Tensor | None,
        course: Course,
        scale: float,
        carrier: Carrier,
    ) -> tuple[Tensor, Tensor | None]:
        """The result, and the weights of sinks."""
        beside = Beside(mask, own, every, sinks)
        out, top, total = computed(lambda: _forward(q, k, v, beside, course, scale, carrier))
        assert out is not None
        out = out.detach()  # which may be kept elsewhere, by itself
        pair = carrier.holds()
        if pair is not None:
            k, v = taken_apart(pair, k, v)
        ctx.save_for_backward(q, k, v, mask, own, every, out, top, total)
        ctx.course, ctx.scale, ctx.carrier = course, scale, carrier
        lost = None
        if sinks is not None:
            assert top is not None
            lost = (sinks.to(top.dtype)[:, None] - top).exp()
            lost = lost if total is None else lost / total
            ctx.mark_non_differentiable(lost)
        return out, lost

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, lost: None = None) -> Any:
        q, k, v, mask, own, every, out, top, total = ctx.saved_tensors
        beside = Beside(mask, own, every, None)
        course: Course = ctx.course
        mask_wanted = ctx.needs_input_grad[3]
        pair_wanted = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        grad = grad.contiguous()
        dq = torch.zeros_like(q, dtype=wide(q.dtype))
        added = torch.zeros(mask.shape, dtype=dq.dtype, device=q.device) if mask_wanted else None
        steps = iter(course.steps)

        def visit(pair: Tensor) -> Tensor:
            keys, values = taken_apart(pair, k, v)
            sums = torch.zeros_like(pair, dtype=wide(q.dtype))
            dk, dv = taken_apart(sums, k, v)
            first, seen = next(steps)
            for block in seen:
                part = backward(
                    rows_of(grad, block),
                    rows_of(q, block),
                    columns_of(keys, block),
                    columns_of(values, block),
                    hidden_by(beside, block, first),
                    rows_of(out, block),
                    rows_of(top, block),
                    None if total is None else rows_of(total, block),
                    block,
                    ctx.scale,
                    mask_wanted,
                )
                rows_of(dq, block).add_(part.q)
                columns_of(dk, block).add_(part.k)
                columns_of(dv, block).add_(part.v)
                if added is not None:
                    of_mask(added, block, first).add_(part.mask)
            return sums

        carrier: Carrier = ctx.carrier
        dk, dv = None, None
        if pair_wanted:
            dk, dv = taken_apart(carrier.there_and_back(joined(k, v), visit), k, v)
        else:
            carrier.around(joined(k, v), visit)
        grads = [(dq, q), (dk, k), (dv, v), (added, mask)]
        cast_back = [None if g is None else g.to(x.dtype) for g, x in grads]
        return *cast_back, None, None, None, None, None, None


class _Sinks(Function):
    """``out`` as it is, and the gradient of sinks, each a weight that multiplies nothing.

    By itself, since a backward that wants parameters' gradients alone must not go around a ring.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, sinks: Tensor, lost: Tensor) -> Tensor:
        ctx.save_for_backward(out, lost)
        ctx.dtype = sinks.dtype
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        out, lost = ctx.saved_tensors
        given = None
        if ctx.needs_input_grad[1]:
            inner = (grad.to(lost.dtype) * out.to(lost.dtype)).sum(-1)
            given = -(lost * inner).sum((0, 2)).to(ctx.dtype)
        return grad, given, None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beside: Beside,
    course: Course,
    scale: float,
    carrier: Carrier,
) -> Result:
    """The result, and by what a row's probabilities are made of its scores again."""
    softmax = Softmax.of_nothing(q, v)
    steps = iter(course.steps)

    def visit(pair: Tensor) -> None:
        keys, values = taken_apart(pair, k, v)
        first, seen = next(steps)
        for block in seen:
            operands = rows_of(q, block), columns_of(keys, block), columns_of(values, block)
            hidden = hidden_by(beside, block, first)
            softmax.add(block.rows, forward(*operands, hidden, block, scale))

    carrier.around(joined(k, v), visit)
    if beside.sinks is not None:
        softmax.add((0, q.shape[2]), Softmax.of_sinks(beside.sinks, softmax))
    apart = beside.mask is not None and beside.mask.dtype is not torch.bool
    return softmax.result().to(q.dtype), *softmax.normalizer(apart)
