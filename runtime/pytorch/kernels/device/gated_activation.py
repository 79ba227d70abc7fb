"""act(gate) * up over rows with strides, and its gradients."""

import triton
import triton.language as tl

from autopar.runtime.pytorch.kernels.device.tanh import tanh


@triton.jit
def activation(x, GELU: tl.constexpr):
    """(act(x), d act / d x): silu x s with s = 1 / (1 + exp(-x)), or gelu by tanh,
    x (1 + t) / 2 with t = tanh(sqrt(2 / pi) (x + 0.044715 x^3))."""
    if GELU:
        t = tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x))
        inner = 0.7978845608028654 * (1 + 0.134145 * x * x)
        value = 0.5 * x * (1 + t)
        derivative = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner
    else:
        s = 1 / (1 + tl.exp(-x))
        value = x * s
        derivative = s * (1 + x * (1 - s))
    return value, derivative


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
    place = row * columns + column
    kind = grad_gate.dtype.element_ty
    tl.store(grad_gate + place, (d * u * derivative).to(kind), mask=inside)
    tl.store(grad_up + place, (d * value).to(kind), mask=inside)
