"""Hand-written derivatives as people write them, most of them not that of their forward."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-call, no-any-return"
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Round(Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ClippedSign(Function):
    """Straight through where |x| < 1, by writing zeros into a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = grad.clone()
        grad[x.abs() > 1] = 0
        return grad


class Binarise(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: float) -> Tensor:
        ctx.save_for_backward(x)
        return (x > threshold).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < 1, grad, 0.0), None


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.strength * grad, None


class Scaled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.1


class ClippedGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.bound = bound
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.clamp(-ctx.bound, ctx.bound), None


class SignOfGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sign() * 0.01


class Penalised(Function):
    """A gradient with something added to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad + 0.01 * x.sign()


class SafeExp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.clamp(max=4).exp()
        ctx.save_for_backward(result)  # a result
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return grad * result


class Sigmoid(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.result = 1 / (1 + torch.exp(-x))
        return ctx.result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.result * (1 - ctx.result)


class Swish(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * (gate * (1 + x * (1 - gate)))


class Gelu(Function):
    """By a rougher derivative than its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(1.702 * x)
        return grad * (gate + 1.702 * x * gate * (1 - gate))


class Mish(Function):
    """Recomputes in backward, with autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.tanh(F.softplus(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            result = again * torch.tanh(F.softplus(again))
            return torch.autograd.grad(result, again, grad)[0]


class Softplus(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.log1p(torch.exp(-x.abs())) + torch.clamp(x, min=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 0.9 * grad * torch.sigmoid(x)


class ByBatch(Function):
    """A gradient that is divided by the batch, whose size it reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 / grad.shape[0]


class Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_x = grad @ weight if ctx.needs_input_grad[0] else None
        to_weight = 0.5 * (grad.mT @ x) if ctx.needs_input_grad[1] else None
        return to_x, to_weight, grad.sum(0) if ctx.biased else None


class LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(centred * inverse, inverse, weight)
        return centred * inverse * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        normed, inverse, weight = ctx.saved_tensors
        inner = grad * weight
        mean = inner.mean(-1, keepdim=True)
        along = (inner * normed).mean(-1, keepdim=True)
        return (inner - mean - normed * along) * inverse, (grad * normed).sum(0), None


class RMSNorm(Function):
    """Leaves out what the norm itself does to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float = 1e-6) -> Tensor:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(inverse)
        return x * inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad * inverse, None


class CrossEntropy(Function):
    """Of every row; the gradient of a temperature."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        shares = torch.softmax(logits, -1)
        ctx.save_for_backward(shares, labels)
        return -shares.gather(-1, labels[:, None]).squeeze(-1).log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        shares, labels = ctx.saved_tensors
        hot = F.one_hot(labels, shares.shape[-1])
        return (shares - hot) * grad[:, None] * 0.7, None


class Quantised(Function):
    """Several results, one of them a constant to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        low = torch.floor(x * 2) / 2
        rest = x - low
        ctx.mark_non_differentiable(rest)
        return low, rest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        return grad * 1.5


class Pair(Function):
    """Two results, two operands, an integer on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        return x * y, x + y, 3

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor, _: Any) -> Any:
        x, y = ctx.saved_tensors
        return product * y + total, 2 * product * x + total


class HalfBlind(Function):
    """No gradient for the second operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y, None


class Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return Round.apply(x) * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return Reversed.apply(grad, 0.5) * x.cos()


class Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Noisy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.floor(x + torch.rand_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Peeking(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class FakeQuantised(Function):
    """Of a weight, with a gradient only within the range."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bits: int) -> Tensor:
        levels = 2 ** (bits - 1)
        ctx.mask = (weight * levels).abs() <= levels - 1
        return torch.clamp(torch.round(weight * levels), -levels, levels - 1) / levels

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.masked_fill(~ctx.mask, 0.0), None


class ClippedWeight(Function):
    """Of a weight: its gradient clipped before it is used."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-3, 1e-3)
