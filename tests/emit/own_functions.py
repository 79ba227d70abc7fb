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


class MaskedSoftmax(Function):
    """Hidden entries are 0, also in a row that has no other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: Tensor) -> Tensor:
        shares = torch.softmax(x.masked_fill(hidden, -1e30), -1)
        shares.masked_fill_(hidden, 0)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (shares,) = ctx.saved_tensors
        inner = grad * shares
        return inner - shares * inner.sum(-1, keepdim=True), None


class Nearest(Function):
    """The nearest row of a codebook and its number, straight through; rows in one long dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor) -> Any:
        flat = x.reshape(-1, codes.shape[1])
        far = codes.square().sum(1) - 2 * (flat @ codes.T)
        number = far.argmin(1)
        ctx.save_for_backward(number, codes)
        ctx.mark_non_differentiable(number)
        return codes.index_select(0, number).view_as(x), number

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        number, codes = ctx.saved_tensors
        to_codes = torch.zeros_like(codes)
        to_codes.index_add_(0, number, grad.reshape(-1, codes.shape[1]))
        return grad.clone(), to_codes


class ByHeads(Function):
    """Every head of a row by its own norm, by a rougher derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int, width: int) -> Tensor:
        parts = x.unflatten(-1, (heads, width))
        inverse = torch.rsqrt(parts.square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(inverse)
        ctx.sizes = heads, width
        return (parts * inverse).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return (grad.unflatten(-1, ctx.sizes) * inverse).flatten(-2), None, None


class RowsClipped(Function):
    """The gradient of every row is at most so long: not linear in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.bound = bound
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        length = grad.square().sum(-1, keepdim=True).sqrt()
        return grad * (ctx.bound / length.clamp(min=ctx.bound)), None


class AnyOfTwo(Function):
    """Two results; where one is not read its gradient is None, not zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x.cumsum(-1)

    @staticmethod
    def backward(ctx: Any, one: Any, two: Any) -> Any:
        if two is None:
            return one - one.mean(0)
        return two if one is None else one * 2 + two


class Whitened(Function):
    """Statistics of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        deviation = x.std(0) + 1e-3
        ctx.save_for_backward(deviation)
        return (x - x.mean(0)) / deviation

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (deviation,) = ctx.saved_tensors
        return grad / deviation


class ByRows(Function):
    """A number of rows as a constant argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        return x.reshape(rows, -1).softmax(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, None


class OverRows(Function):
    """Divided by a size that it reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.softmax(-1) / len(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / len(grad)


class FewRows(Function):
    """Another function of few rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.softmax(-1) if len(x) > 2 else x.softmax(-1) * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class RowWeights(Function):
    """A weight of every row, by its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.softmax(-1) * weight[: len(x)].unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grad * weight[: len(grad)].unsqueeze(1), None


class RowNumbers(Function):
    """What is added to a row follows from its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.softmax(-1) + torch.arange(len(x), dtype=x.dtype).unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Shifted(Function):
    """A sum over rows in backward that goes into the gradient of every row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.softmax(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.sum(0)


class _Bias(Function):
    """A bias behind a softmax; what its gradient is differs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(bias)
        return x.softmax(-1) + bias


class SummedBias(_Bias):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.sum(0) * 0.5


class AveragedBias(_Bias):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.mean(0)


class ClippedBias(_Bias):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.sum(0).clamp(-1e-2, 1e-2)


class DecayedBias(_Bias):
    """Decay that would be added once for every piece."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (bias,) = ctx.saved_tensors
        return grad, grad.sum(0) + 0.1 * bias


class TopRow(Function):
    """Its largest entry of every column."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.max(0, keepdim=True).values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Everything(Function):
    """Every entry meets every other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.square().sum().sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Counted(Function):
    """Another function at every call."""

    calls = 0

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:
        Counted.calls += 1
        return x.softmax(-1) * (1 + Counted.calls % 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class AboveSecond(Function):
    """Has an op that no rule is known for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.kthvalue(2, -1, keepdim=True).values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Wrapped(Function):
    """A gradient of its own for its second operand, whatever comes in (`L2Wrap` of RWKV-LM)."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        largest, at = x.max(-1, keepdim=True)
        return grad, torch.zeros_like(x).scatter_(-1, at, largest * 0.1 / len(x))
