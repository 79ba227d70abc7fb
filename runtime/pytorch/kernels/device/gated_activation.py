"""act(gate) * up over rows with strides, and its gradients."""

import triton
import triton.language as tl


@triton.jit
def activation(x, GELU: tl.constexpr):
    """(act(x), d act / d x) of x s(x) for silu and x s(u) for gelu by tanh, since
    (1 + tanh(u / 2)) / 2 = s(u), with s(u) = 1 / (1 + exp(-u)) and
    u = 2 sqrt(2 / pi) (x + 0.044715 x^3); s' = s(u) s(-u) loses no digits where s is near 1."""
    if GELU:
        u = 1.5957691216057308 * x * (1 + 0.044715 * x * x)
        slope = 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        u = x
        slope = 1.0
    s = 1 / (1 + tl.exp(-u))
    rest = 1 / (1 + tl.exp(u))
    return x * s, s + x * s * rest * slope


@triton.jit
def forward(
    gate, up, out, columns, gate_stride, up_stride,
    GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, _ = activation(g, GELU)
    tl.store(out + row * columns + column, (value * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    grad, gate, up, grad_gate, grad_up, columns, grad_stride, gate_stride, up_stride,
    GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same programs; the activation is computed again from what was kept."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, derivative = activation(g, GELU)
    offsets = row * columns + column
    kind = grad_gate.dtype.element_ty
    tl.store(grad_gate + offsets, (d * u * derivative).to(kind), mask=inside)
    tl.store(grad_up + offsets, (d * value).to(kind), mask=inside)
