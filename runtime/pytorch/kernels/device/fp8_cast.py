"""Rows and tiles scaled into the range of an 8-bit float, and rounded to it."""

import triton
import triton.language as tl

TINY = tl.constexpr(1e-12)
"""Least largest magnitude: scales of zeros stay finite."""


@triton.jit
def scale_of(largest, HIGHEST: tl.constexpr):
    """(scale, 1 / scale), divided as IEEE 754 says, as torch does."""
    scale = tl.div_rn(tl.maximum(largest, TINY), tl.full((), HIGHEST, tl.float32))
    return scale, tl.div_rn(tl.full((), 1.0, tl.float32), scale)


@triton.jit
def rounded(x, HIGHEST: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """float32 -> the bits of the nearest 8-bit float, ties to even, beyond the range the largest;
    MANTISSA 3 is float8_e4m3fn, 2 float8_e5m2. Written in integers for devices before sm_89, which
    have no instruction, and for the interpreter."""
    x = tl.where(x != x, x, tl.minimum(tl.maximum(x, -HIGHEST), HIGHEST))
    if HARDWARE:
        if MANTISSA == 3:
            bits = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            bits = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        word = x.to(tl.int32, bitcast=True)
        magnitude = word & 0x7FFFFFFF
        shift: tl.constexpr = 23 - MANTISSA
        bias: tl.constexpr = 7 if MANTISSA == 3 else 15
        half = (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)
        normal = ((magnitude + half) >> shift) - ((127 - bias) << MANTISSA)
        # Adding a float whose last digit is the smallest 8-bit one rounds to whole ones of those.
        unit: tl.constexpr = 2.0 ** (24 - bias - MANTISSA)
        summed = magnitude.to(tl.float32, bitcast=True) + unit
        word_of_unit: tl.constexpr = (127 + 24 - bias - MANTISSA) << 23
        small = summed.to(tl.int32, bitcast=True) - word_of_unit
        least: tl.constexpr = (128 - bias) << 23
        bits = tl.where(magnitude < least, small, normal)
        nan: tl.constexpr = 0x7F
        bits = tl.where(magnitude > 0x7F800000, nan, bits) | ((word >> 24) & 0x80)
        bits = bits.to(tl.uint8)
    return bits


@triton.jit
def row_largest(x, largest, columns, stride, BLOCK: tl.constexpr):
    """A program a row: the largest magnitude."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        read = tl.load(x + row * stride + column, mask=column < columns, other=0.0)
        most = tl.maximum(most, tl.abs(read.to(tl.float32)))
    tl.store(largest + row, tl.max(most, 0))


@triton.jit
def cast_rows(
    x, out, scales, columns, stride,
    HIGHEST: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr,
    ONE_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a row; with ONE_SCALE it reads the scale of all, else finds and writes its own."""
    row = tl.program_id(0).to(tl.int64)
    if ONE_SCALE:
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(scales))
    else:
        most = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            read = tl.load(x + row * stride + column, mask=column < columns, other=0.0)
            most = tl.maximum(most, tl.abs(read.to(tl.float32)))
        scale, inverse = scale_of(tl.max(most, 0), HIGHEST)
        tl.store(scales + row, scale)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        read = tl.load(x + row * stride + column, mask=column < columns, other=0.0)
        bits = rounded(read.to(tl.float32) * inverse, HIGHEST, MANTISSA, HARDWARE)
        tl.store(out + row * columns + column, bits, mask=column < columns)


@triton.jit
def cast_tiles(
    x, out, scales, rows, columns, stride,
    HIGHEST: tl.constexpr, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program ROWS x COLUMNS numbers: WHOLE has one scale, else each of its rows has one."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    read = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
    read = read.to(tl.float32)
    largest = tl.max(tl.abs(read), 1)
    across = tl.num_programs(1)
    if WHOLE:
        scale, inverse = scale_of(tl.max(largest, 0), HIGHEST)
        tl.store(scales + tl.program_id(0) * across + tl.program_id(1), scale)
        scaled = read * inverse
    else:
        scale, inverse = scale_of(largest, HIGHEST)
        tl.store(scales + row * across + tl.program_id(1), scale, mask=row < rows)
        scaled = read * inverse[:, None]
    bits = rounded(scaled, HIGHEST, MANTISSA, HARDWARE)
    tl.store(out + row[:, None] * columns + column[None, :], bits, mask=inside)
