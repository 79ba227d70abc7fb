"""The cases of `autopar profile` in PyTorch: what the calls compute is what emitted programs call,
and the framework's own work for each call is in the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from autopar.runtime.profile.cases import CHAIN_BYTES, Case
from autopar.runtime.pytorch.layers import attention
from autopar.runtime.pytorch.norms import rms_norm, rotary
from autopar.runtime.pytorch.vocabulary import cross_entropy

Call = Callable[..., torch.Tensor]


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotary(x, cos, sin)


def _biased(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What a bias adds to the product that it is one call with: the product is next to nothing."""
    return F.linear(x.detach()[:, :1], bias.detach()[:, None], bias)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


CALLS: Mapping[str, Callable[[Case], Call]] = {
    "linear": lambda case: F.linear,
    "attention": lambda case: partial(attention, causal=case.attrs["causal"]),
    "add": lambda case: lambda x, _: x + x,
    "bias": lambda case: _biased,
    "mul": lambda case: torch.mul,
    "gelu": lambda case: F.gelu,
    "silu": lambda case: F.silu,
    "relu": lambda case: F.relu,
    "softmax": lambda case: partial(F.softmax, dim=-1),
    "rotary": lambda case: _rotary,
    "layer_norm": lambda case: _layer_norm,
    "rms_norm": lambda case: partial(rms_norm, eps=1e-6),
    "embedding": lambda case: F.embedding,
    "cross_entropy": lambda case: cross_entropy,
    "conv": lambda case: partial(F.conv2d, padding=1),
}


class Chain:
    """A case with its tensors: `forward` makes the results, `backward` uses them up."""

    def __init__(
        self,
        case: Case,
        dtype: torch.dtype,
        device: torch.device,
        chain_bytes: float = CHAIN_BYTES,
    ) -> None:
        """``chain_bytes``: what the forward of the chain touches."""
        self.calls = case.calls(str(dtype).removeprefix("torch."), chain_bytes)
        self.case = case
        self._call = CALLS[case.called](case)
        self._made: list[torch.Tensor] = []
        make = partial(_operand, case, dtype=dtype, device=device)
        lanes = 1 if case.chained else self.calls
        self._firsts = [make(0) for _ in range(lanes)]
        self._others = [[make(i) for i in range(1, len(case.operands))] for _ in range(self.calls)]

    def forward(self) -> None:
        if not self.case.chained:
            pairs = zip(self._firsts, self._others, strict=True)
            self._made = [self._call(x, *others) for x, others in pairs]
            return
        x = self._firsts[0]
        for others in self._others:
            x = self._call(x, *others)
        self._made = [x]

    def backward(self) -> None:
        torch.autograd.backward(self._made, [torch.ones_like(x) for x in self._made])
        self._made = []

    def clear(self) -> None:
        """Forgets gradients, as a step does before it starts."""
        for x in [*self._firsts, *(x for others in self._others for x in others)]:
            x.grad = None


def _operand(case: Case, position: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    shape = case.operands[position]
    if position in case.below:
        return torch.randint(0, case.below[position], shape, device=device)
    # Positive, and scaled so that a chain neither vanishes into denormal numbers nor overflows.
    made = torch.rand(shape, device=device, dtype=dtype) + 0.5
    if (over := case.over(position)) > 1:
        made = made / over
    return made.requires_grad_(position == 0 or position in case.trained)


class Update:
    """One step of AdamW on ``elements`` parameters, as the trainer makes it."""

    def __init__(self, elements: int, device: torch.device) -> None:
        pieces = [torch.randn(elements // 8, device=device) for _ in range(8)]
        self._held = [torch.nn.Parameter(piece) for piece in pieces]
        for held in self._held:
            held.grad = torch.randn_like(held)
        self._optimizer = torch.optim.AdamW(self._held, lr=1e-4, fused=True)

    def step(self) -> None:
        self._optimizer.step()
