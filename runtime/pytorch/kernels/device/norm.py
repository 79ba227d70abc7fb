"""RMSNorm and LayerNorm of rows, with a residual added first, and their gradients."""

import triton
import triton.language as tl


@triton.jit
def forward(
    x, residual, weight, bias, out, summed, means, inverses, width, x_stride, residual_stride,
    epsilon, offset,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a row; what is normalized is the sum as it is kept, in its dtype."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    h = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        pointers = residual + row * residual_stride + column
        h += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        rounded = h.to(summed.dtype.element_ty)
        tl.store(summed + row * width + column, rounded, mask=inside)
        h = rounded.to(tl.float32)
    if CENTRED:
        mean = tl.sum(h, 0) / width
        tl.store(means + row, mean)
        h = tl.where(inside, h - mean, 0.0)
    inverse = 1 / tl.sqrt(tl.sum(h * h, 0) / width + epsilon)
    tl.store(inverses + row, inverse)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    y = h * inverse * w
    if BIAS:
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    grad, grad_sum, h, weight, means, inverses, grad_x, grad_weights, grad_biases,
    rows, width, grad_stride, grad_sum_stride, h_stride, each, offset,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, SUM: tl.constexpr, WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program ``each`` rows, one after the other; the weight's gradient over them is added up in
    registers and written once, to the program's own row of ``grad_weights``."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    weight_part = tl.zeros((BLOCK,), tl.float32)
    bias_part = tl.zeros((BLOCK,), tl.float32)
    last = tl.minimum((program + 1) * each, rows)
    for row in range(program * each, last):
        d = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(h + row * h_stride + column, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + row)
        if CENTRED:
            unit = tl.where(inside, unit - tl.load(means + row), 0.0)
        unit *= inverse
        through = d * w
        back = through - unit * (tl.sum(unit * through, 0) / width)
        if CENTRED:
            back -= tl.sum(through, 0) / width
        back *= inverse
        if SUM:
            pointers = grad_sum + row * grad_sum_stride + column
            back += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        pointers = grad_x + row * width + column
        tl.store(pointers, back.to(grad_x.dtype.element_ty), mask=inside)
        if WEIGHT:
            weight_part += d * unit
        if WEIGHT and BIAS:
            bias_part += d
    if WEIGHT:
        tl.store(grad_weights + program * width + column, weight_part, mask=inside)
    if WEIGHT and BIAS:
        tl.store(grad_biases + program * width + column, bias_part, mask=inside)


@triton.jit
def weight_gradient(
    grad, h, means, inverses, grad_weights, grad_biases,
    rows, width, grad_stride, h_stride, each,
    CENTRED: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program ``each`` rows and COLUMNS columns: for rows too wide for `backward` to add up."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weight_part = tl.zeros((COLUMNS,), tl.float32)
    bias_part = tl.zeros((COLUMNS,), tl.float32)
    last = tl.minimum((program + 1) * each, rows)
    for start in range(program * each, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < last) & (column[None, :] < width)
        pointers = grad + row[:, None] * grad_stride + column[None, :]
        d = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        pointers = h + row[:, None] * h_stride + column[None, :]
        unit = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            unit -= tl.load(means + row, mask=row < last, other=0.0)[:, None]
        unit *= tl.load(inverses + row, mask=row < last, other=0.0)[:, None]
        weight_part += tl.sum(d * unit, 0)
        if BIAS:
            bias_part += tl.sum(d, 0)
    tl.store(grad_weights + program * width + column, weight_part, mask=column < width)
    if BIAS:
        tl.store(grad_biases + program * width + column, bias_part, mask=column < width)
