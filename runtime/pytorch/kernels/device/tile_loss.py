"""Cross-entropy of x @ weight.T, tile by tile of the logits, which stay in registers."""

import triton
import triton.language as tl

from autopar.runtime.pytorch.kernels.device.cross_entropy import above, capped, slope


@triton.jit
def tile_logits(
    x, weight, rows, row_count, columns, column_count, width, x_stride, weight_stride,
    scale, softcap,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """z [ROWS, COLUMNS] in float32; rows and columns beyond the last are the last one's."""
    row = tl.minimum(rows, row_count - 1).to(tl.int64)
    column = tl.minimum(columns, column_count - 1).to(tl.int64)
    z = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, WIDTH):
        k = start + tl.arange(0, WIDTH)
        a = tl.load(x + row[:, None] * x_stride + k[None, :], mask=(k < width)[None, :], other=0.0)
        b = tl.load(
            weight + column[None, :] * weight_stride + k[:, None],
            mask=(k < width)[:, None],
            other=0.0,
        )
        z = tl.dot(a, b, z, input_precision="ieee")
    return capped(z, scale, softcap, SOFTCAP)


@triton.jit
def tile_gradient(
    z, labels, normalizers, weights, rows, row_count, columns, column_count, first, ignore_index,
    scale, softcap, smooth, share,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """d loss / d (x @ weight.T) [ROWS, COLUMNS] of a tile; 0 beyond the last row and column."""
    inside = rows < row_count
    label = tl.load(labels + rows, mask=inside, other=ignore_index)
    weight = tl.load(weights + rows, mask=inside, other=0.0)
    normalizer = tl.load(normalizers + rows, mask=inside, other=0.0)
    wanted = tl.where(columns[None, :] == (label - first)[:, None], smooth, 0.0) + share
    gradient = weight[:, None] * (tl.exp(z - normalizer[:, None]) - wanted)
    gradient *= slope(z, scale, softcap, SOFTCAP)
    counts = (label != ignore_index)[:, None] & (columns < column_count)[None, :]
    return tl.where(counts, gradient, 0.0)


@triton.jit
def statistics(
    x, weight, labels, tops, totals, targets, sums,
    row_count, column_count, width, x_stride, weight_stride, first, tiles, scale, softcap,
    SOFTCAP: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program ROWS rows and ``tiles`` tiles of columns, a piece of the vocabulary."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(1)
    column = tl.load(labels + rows, mask=rows < row_count, other=-1) - first
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    target = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS,), tl.float32)
    stop = tl.minimum((piece + 1) * tiles * COLUMNS, column_count)
    for start in range(piece * tiles * COLUMNS, stop, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        z = tile_logits(
            x, weight, rows, row_count, columns, column_count, width, x_stride, weight_stride,
            scale, softcap, SOFTCAP, ROWS, COLUMNS, WIDTH,
        )  # fmt: skip
        inside = (columns < column_count)[None, :]
        is_target = inside & (columns[None, :] == column[:, None])
        target += tl.sum(tl.where(is_target, z, 0.0), 1)
        if SUMS:
            summed += tl.sum(tl.where(inside, z, 0.0), 1)
        z = tl.where(inside, z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        shift = above(higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift[:, None]), 1)
        top = higher
    offsets = piece * row_count + rows
    tl.store(tops + offsets, top, mask=rows < row_count)
    tl.store(totals + offsets, total, mask=rows < row_count)
    tl.store(targets + offsets, target, mask=rows < row_count)
    if SUMS:
        tl.store(sums + offsets, summed, mask=rows < row_count)


@triton.jit
def gradient_of_inputs(
    x, weight, labels, normalizers, weights, grad_x,
    row_count, column_count, width, x_stride, weight_stride, first, tiles, ignore_index,
    scale, softcap, smooth, share,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program ROWS rows and a piece of the vocabulary: nobody else adds to its rows of
    ``grad_x`` [pieces, rows, width], float32, zero before."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(1)
    out_row = (piece * row_count + rows).to(tl.int64)
    stop = tl.minimum((piece + 1) * tiles * COLUMNS, column_count)
    for start in range(piece * tiles * COLUMNS, stop, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        z = tile_logits(
            x, weight, rows, row_count, columns, column_count, width, x_stride, weight_stride,
            scale, softcap, SOFTCAP, ROWS, COLUMNS, WIDTH,
        )  # fmt: skip
        gradient = tile_gradient(
            z, labels, normalizers, weights, rows, row_count, columns, column_count, first,
            ignore_index, scale, softcap, smooth, share, SOFTCAP,
        ).to(weight.dtype.element_ty)  # fmt: skip
        read = tl.minimum(columns, column_count - 1).to(tl.int64)
        for low in range(0, width, WIDTH):
            k = low + tl.arange(0, WIDTH)
            b = tl.load(
                weight + read[:, None] * weight_stride + k[None, :],
                mask=(k < width)[None, :],
                other=0.0,
            )
            out = grad_x + out_row[:, None] * width + k[None, :]
            inside = (rows < row_count)[:, None] & (k < width)[None, :]
            before = tl.load(out, mask=inside, other=0.0)
            tl.store(out, tl.dot(gradient, b, before, input_precision="ieee"), mask=inside)
        # What one thread wrote, another may read for the next tile.
        tl.debug_barrier()


@triton.jit
def gradient_of_weight(
    x, weight, labels, normalizers, weights, grad_weight,
    row_count, column_count, width, x_stride, weight_stride, first, ignore_index,
    scale, softcap, smooth, share,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program COLUMNS columns of the vocabulary: nobody else adds to its rows of ``grad_weight``
    [columns, width], float32, zero before."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    out_row = columns.to(tl.int64)
    for start in range(0, row_count, ROWS):
        rows = start + tl.arange(0, ROWS)
        z = tile_logits(
            x, weight, rows, row_count, columns, column_count, width, x_stride, weight_stride,
            scale, softcap, SOFTCAP, ROWS, COLUMNS, WIDTH,
        )  # fmt: skip
        gradient = tile_gradient(
            z, labels, normalizers, weights, rows, row_count, columns, column_count, first,
            ignore_index, scale, softcap, smooth, share, SOFTCAP,
        ).to(x.dtype.element_ty)  # fmt: skip
        turned = tl.trans(gradient)
        read = tl.minimum(rows, row_count - 1).to(tl.int64)
        for low in range(0, width, WIDTH):
            k = low + tl.arange(0, WIDTH)
            a = tl.load(
                x + read[:, None] * x_stride + k[None, :], mask=(k < width)[None, :], other=0.0
            )
            out = grad_weight + out_row[:, None] * width + k[None, :]
            inside = (columns < column_count)[:, None] & (k < width)[None, :]
            before = tl.load(out, mask=inside, other=0.0)
            tl.store(out, tl.dot(turned, a, before, input_precision="ieee"), mask=inside)
        # What one thread wrote, another may read for the next tile.
        tl.debug_barrier()
