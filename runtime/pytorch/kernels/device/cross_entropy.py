"""Cross-entropy of rows of logits: the numbers that make up a row's softmax, and the gradient."""

import triton
import triton.language as tl

from autopar.runtime.pytorch.kernels.device.tanh import tanh


@triton.jit
def capped(logits, scale, softcap, SOFTCAP: tl.constexpr):
    """softcap tanh(scale logits / softcap), or scale logits."""
    z = logits * scale
    if SOFTCAP:
        z = softcap * tanh(z / softcap)
    return z


@triton.jit
def slope(z, scale, softcap, SOFTCAP: tl.constexpr):
    """d capped / d logits, from what `capped` gave."""
    factor = scale
    if SOFTCAP:
        factor = scale * (1 - (z / softcap) * (z / softcap))
    return factor


@triton.jit
def above(top):
    """What is taken from logits before exp: 0 where all of them are -inf, so that none is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def row_statistics(
    logits, labels, tops, totals, targets, sums, columns, stride, first, scale, softcap,
    SOFTCAP: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a row; the sum of exponentials is rescaled whenever a larger logit comes
    (Milakov and Gimelshein, arXiv:1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    summed = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        read = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
        z = capped(read, scale, softcap, SOFTCAP)
        if SUMS:
            summed += tl.sum(tl.where(inside, z, 0.0), 0)
        z = tl.where(inside, z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - above(higher)) + tl.sum(tl.exp(z - above(higher)), 0)
        top = higher
    column = tl.load(labels + row) - first
    inside = (column >= 0) & (column < columns)
    read = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(targets + row, tl.where(inside, capped(read, scale, softcap, SOFTCAP), 0.0))
    if SUMS:
        tl.store(sums + row, summed)


@triton.jit
def row_gradient(
    logits, out, labels, normalizers, weights, columns, stride, out_stride, first, ignore_index,
    scale, softcap, smooth, share,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a row and BLOCK columns: weight (softmax - (1 - smoothing) [label] - share) times
    the slope of what was done to the logits; ``out`` may be ``logits``, each number is read before
    its place is written."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    label = tl.load(labels + row)
    weight = tl.where(label == ignore_index, 0.0, tl.load(weights + row))
    read = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    z = capped(read, scale, softcap, SOFTCAP)
    wanted = tl.where(column == label - first, smooth, 0.0) + share
    gradient = weight * (tl.exp(z - tl.load(normalizers + row)) - wanted)
    gradient *= slope(z, scale, softcap, SOFTCAP)
    gradient = tl.where(label == ignore_index, 0.0, gradient)
    tl.store(out + row * out_stride + column, gradient.to(out.dtype.element_ty), mask=inside)
