"""The feed-forward part of a layer in chunks of tokens: what stands between its products is there
for one chunk at a time, forward and backward.

Kept for backward are what goes in and the matrices. Backward takes a chunk after the other: its
first products and the gate once more, its gradients, and what it adds to those of the matrices
(Liu and Abbeel 2023, Blockwise Parallel Transformer, section 3). It writes into nothing that was
kept: it may run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autopar.runtime.pytorch.collectives import apply
from autopar.runtime.pytorch.loss_head import chunk_sizes
from autopar.runtime.pytorch.made_again import by_itself
from autopar.runtime.pytorch.pieces import Layer, layer_parts
from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.autograd import wanted

Gate = Callable[..., Tensor]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def feed_forward(
    x: Tensor,
    ups: Sequence[Layer],
    down: Layer,
    *,
    gate: Gate,
    chunks: int,
) -> Tensor:
    """``down(gate(up(x) for up in ups))``, in ``chunks`` of the tokens, as equal as they can be.

    x [..., s, k], ups matrices [f, k] or these and biases [f], down [o, f] -> [..., s, o] in the
    dtype of x.

    gate: from [..., f] of every first product to [..., f], element by element, without chance.

    Where ranks split f the result is a partial sum, for which ``down`` must have no bias. Gradients
    of matrices are added up in float32 at least. Raises `ProgramError` for no chunks.
    """
    weight, bias = layer_parts(down)
    if bias is not None:
        raise ProgramError("feed_forward: the bias behind the last product is added to its result")
    if x.dim() < 2:
        raise ProgramError(f"feed_forward: {tuple(x.shape)} has no dim of tokens before the last")
    if chunks < 1:
        raise ProgramError(f"feed_forward: {chunks} chunks; give 1 or more")
    held = [part for up in ups for part in layer_parts(up)]
    result: Tensor = apply(_FeedForward, x, weight, gate, chunks, *held)
    return result


class _FeedForward(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, gate: Gate, chunks: int, *held: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, down, *held)
        ctx.gate, ctx.sizes = gate, chunk_sizes(x.shape[-2], min(chunks, max(x.shape[-2], 1)))
        result = x.new_empty(*x.shape[:-1], down.shape[0])
        with by_itself():
            for rows, made in _each(ctx.sizes, x, result):
                made.copy_(F.linear(gate(*_firsts(rows, held)).to(x.dtype), down))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, down, *held = ctx.saved_tensors
        tensors = [True, True, False, False, *(one is not None for one in held)]
        asks_x, asks_down, _, _, *asks_held = wanted(ctx, tensors)
        sums = _Sums([down, *held], len(ctx.sizes) > 1)
        dx = torch.zeros_like(x) if asks_x else None
        for place, (rows, given) in enumerate(_each(ctx.sizes, x, grad)):
            leaves = [_leaf(rows, asks_x), *map(_leaf, held, asks_held)]
            with torch.enable_grad():
                hidden = ctx.gate(*_firsts(leaves[0], leaves[1:])).to(x.dtype)
            if asks_down:
                flat = given.flatten(0, -2), hidden.detach().flatten(0, -2)
                sums.add(0, flat[0].t(), flat[1])
            if not hidden.requires_grad:  # nothing is asked for, or comparisons let nothing through
                continue
            asked = [i for i, one in enumerate(leaves) if one is not None and one.requires_grad]
            some = [leaves[i] for i in asked]
            made: Sequence[Tensor | None] = torch.autograd.grad(
                hidden, some, given @ down, allow_unused=True
            )
            del hidden
            for number, part in zip(asked, made, strict=True):
                if part is None:
                    continue
                if number:
                    sums.add(number, part)
                elif dx is not None:
                    _part(dx, ctx.sizes, place).copy_(part)
        of_down, *of_held = sums.each()
        return dx, of_down, None, None, *of_held


class _Sums:
    """Gradients of matrices and biases, over chunks: in float32 at least where there are several,
    in the dtype of what they are of in the end."""

    def __init__(self, of: Sequence[Tensor | None], several: bool) -> None:
        self.of, self.several = of, several
        self.made: list[Tensor | None] = [None] * len(of)

    def add(self, place: int, one: Tensor, other: Tensor | None = None) -> None:
        """``one``, or its product with ``other``."""
        sums = self.made[place]
        if sums is not None and other is not None and sums.dtype == one.dtype:
            sums.addmm_(one, other)
            return
        part = one if other is None else one @ other
        wide = torch.promote_types(part.dtype, torch.float32) if self.several else part.dtype
        self.made[place] = part.to(wide) if sums is None else sums.add_(part)

    def each(self) -> list[Tensor | None]:
        return [
            None if made is None or of is None else made.to(of.dtype)
            for made, of in zip(self.made, self.of, strict=True)
        ]


def _firsts(x: Tensor, held: Sequence[Tensor | None]) -> list[Tensor]:
    """What every first product gives; ``held``: weight and bias of each in turns."""
    return [
        F.linear(x, weight, bias)
        for weight, bias in zip(held[::2], held[1::2], strict=True)
        if weight is not None
    ]


def _leaf(tensor: Tensor | None, asked: bool) -> Any:
    return None if tensor is None else tensor.detach().requires_grad_(asked)


def _each(sizes: Sequence[int], *tensors: Tensor) -> Any:
    """The chunks of tensors [..., s, n], as views."""
    return zip(*(torch.split(tensor, [*sizes], dim=-2) for tensor in tensors), strict=True)


def _part(tensor: Tensor, sizes: Sequence[int], place: int) -> Tensor:
    return tensor.narrow(-2, sum(sizes[:place]), sizes[place])
