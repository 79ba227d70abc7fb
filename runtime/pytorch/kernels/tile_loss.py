"""Linear and cross-entropy of it, whose logits are never written.

Forward goes over tiles of the logits with the log-sum-exp so far; backward computes each tile again
from the log-sum-exp, once for the gradient of the inputs and once for that of the weight, as
attention's does (Dao et al., arXiv:2205.14135) and Wijmans et al. for this loss
(arXiv:2411.09009). That is 5 products where plain backward takes 3, for [rows, V] less of memory.
Each place of a gradient has one program that adds to it, so two runs give the same bits; sums are
kept in float32, [V, E] and [pieces, rows, E] of scratch while backward runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.pytorch.kernels import cross_entropy
from autopar.runtime.pytorch.kernels.cross_entropy import (
    PLAIN,
    CrossEntropy,
    Statistics,
    empty_statistics,
    losses,
    merged,
)
from autopar.runtime.pytorch.kernels.launch import (
    KernelUnavailable,
    blocks,
    check_dtypes,
    interpreted,
    launch,
    power_of_two,
)

PROGRAMS = 132
"""Programs that keep a device busy, one for each of an H100's processors, whose registers it takes
up: a constant, so that sums are in one order on every device."""
PIECES = 8
"""Most pieces of the vocabulary, so copies of the inputs' gradient."""


def tile_loss(x: Tensor, weight: Tensor, labels: Tensor, form: CrossEntropy = PLAIN) -> Tensor:
    """Losses, float32 [R], of inputs x [R, E], the head's weight [V, E] and labels int64 [R];
    differentiable by x and weight, which have one dtype."""
    result: Tensor = _TileLoss.apply(x, weight, labels, form)  # type: ignore[no-untyped-call]
    return result


def reference(x: Tensor, weight: Tensor, labels: Tensor, form: CrossEntropy = PLAIN) -> Tensor:
    """The same in plain torch."""
    return cross_entropy.reference(F.linear(x, weight), labels, form)


def statistics(
    x: Tensor, weight: Tensor, labels: Tensor, first: int = 0, form: CrossEntropy = PLAIN
) -> Statistics:
    """Of columns ``first`` to ``first + V'`` of the vocabulary, whose weight is given [V', E]."""
    x, weight = _checked(x, weight)
    (rows, width), columns = x.shape, weight.shape[0]
    tile = _tile(x, 64)
    tiles, pieces = _pieces(rows, columns, tile)
    numbers = empty_statistics(x, (pieces, rows), form.smooths)
    launch(
        "tile_loss.statistics",
        (blocks(rows, tile["ROWS"]), pieces),
        *(x, weight, labels.contiguous(), numbers.top, numbers.total, numbers.target),
        numbers.top if numbers.summed is None else numbers.summed,
        *(rows, columns, width, x.stride(0), weight.stride(0), first, tiles),
        *(form.scale, form.softcap),
        SOFTCAP=form.softcap != 0.0,
        SUMS=form.smooths,
        **tile,
    )
    return merged(numbers)


def gradients(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    first: int,
    log_sum_exp: Tensor,
    form: CrossEntropy = PLAIN,
    weights: Tensor | None = None,
    vocabulary: int | None = None,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Of x and of weight, as ``wanted``; the arguments are those of `chunk_loss.gradient`. Where
    the vocabulary is split, that of x is this rank's part of a sum."""
    x, weight = _checked(x, weight)
    (rows, width), columns = x.shape, weight.shape[0]
    tile = _tile(x, 32)
    each = torch.ones((), device=x.device) if weights is None else weights.float()
    tensors = (labels.contiguous(), log_sum_exp.contiguous(), each.expand(rows).contiguous())
    sizes = (rows, columns, width, x.stride(0), weight.stride(0), first)
    share = form.label_smoothing / (vocabulary or columns)
    numbers = (form.ignore_index, form.scale, form.softcap, 1 - form.label_smoothing, share)
    options = {"SOFTCAP": form.softcap != 0.0, **tile}
    grad_x = grad_weight = None
    if wanted[0]:
        tiles, pieces = _pieces(rows, columns, tile)
        parts = x.new_zeros((pieces, rows, width), dtype=torch.float32)
        grid: tuple[int, ...] = (blocks(rows, tile["ROWS"]), pieces)
        name = "tile_loss.gradient_of_inputs"
        launch(name, grid, x, weight, *tensors, parts, *sizes, tiles, *numbers, **options)
        grad_x = parts.sum(0).to(x.dtype)
    if wanted[1]:
        summed = x.new_zeros((columns, width), dtype=torch.float32)
        grid = (blocks(columns, tile["COLUMNS"]),)
        name = "tile_loss.gradient_of_weight"
        launch(name, grid, x, weight, *tensors, summed, *sizes, *numbers, **options)
        grad_weight = summed.to(weight.dtype)
    return grad_x, grad_weight


def _checked(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    check_dtypes("tile_loss", x, weight)
    if x.dtype is torch.bfloat16 and interpreted():
        raise KernelUnavailable(
            "triton's interpreter multiplies the bits of bfloat16 as if they were integers: give "
            "it float32 or float16, or call `reference` of the same file"
        )
    if x.dtype != weight.dtype or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"inputs {list(x.shape)} in {x.dtype}, weight {list(weight.shape)} in {weight.dtype}: "
            "the last dims and the dtypes must be the same"
        )
    return x.contiguous(), weight.contiguous()


def _tile(x: Tensor, width: int) -> dict[str, int]:
    """Sizes of a tile: the largest without spilled registers (``benchmarks/kernels.py``), with
    ``width`` of the dim that a product sums over. float32 is kept exact, without tensor cores."""
    rows = power_of_two(max(x.shape[0], 16))
    if x.dtype is torch.float32:
        return {"ROWS": min(rows, 64), "COLUMNS": 64, "WIDTH": 16, "num_warps": 8}
    return {"ROWS": min(rows, 128), "COLUMNS": 128, "WIDTH": width, "num_warps": 8, "num_stages": 3}


def _pieces(rows: int, columns: int, tile: dict[str, int]) -> tuple[int, int]:
    """(tiles of a piece of the vocabulary, pieces): as many as keep a device busy."""
    tiles = blocks(columns, tile["COLUMNS"])
    pieces = min(PROGRAMS // blocks(max(rows, 1), tile["ROWS"]), PIECES, tiles)
    each = blocks(tiles, max(pieces, 1))
    return each, blocks(tiles, each)


class _TileLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, form: CrossEntropy) -> Tensor:
        numbers = statistics(x, weight, labels, 0, form)
        loss, log_sum_exp = losses(numbers, labels, weight.shape[0], form)
        ctx.save_for_backward(x, weight, labels, log_sum_exp)
        ctx.form = form
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, labels, log_sum_exp = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[:2])
        return (
            *gradients(x, weight, labels, 0, log_sum_exp, ctx.form, grad, wanted=wanted),
            None,
            None,
        )
