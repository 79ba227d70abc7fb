"""Pairs of numbers turned by an angle that belongs to their position."""

import triton
import triton.language as tl


@triton.jit
def turn(
    x, out, cos, sin, direction,
    positions, heads, half, width,
    x_sample, x_position, x_head, out_sample, out_position, out_head,
    angle_sample, angle_position,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """A program a sample, a position and HEADS heads, which share its angles. Columns beyond
    2 half are copied, REST of them in a block (0: there are none)."""
    index = tl.program_id(0)
    sample = (index // positions).to(tl.int64)
    position = (index % positions).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    angle = sample * angle_sample + position * angle_position + pair
    c = tl.load(cos + angle, mask=pair < half, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=pair < half, other=0.0).to(tl.float32) * direction
    x += sample * x_sample + position * x_position
    out += sample * out_sample + position * out_position
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half
    a = tl.load(x + head * x_head + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + head * x_head + second, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + head * out_head + first, (a * c - b * s).to(kind), mask=inside)
    tl.store(out + head * out_head + second, (b * c + a * s).to(kind), mask=inside)
    if REST > 0:
        column = 2 * half + tl.arange(0, REST)[None, :]
        beyond = (head < heads) & (column < width)
        rest = tl.load(x + head * x_head + column, mask=beyond, other=0.0)
        tl.store(out + head * out_head + column, rest, mask=beyond)
