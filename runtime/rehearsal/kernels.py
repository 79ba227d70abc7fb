"""What GPUs run as one kernel where other devices take several ops, on a rehearsed device: in place
of what those would keep for backward, what the kernel keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.pytorch.collectives import apply
from autopar.runtime.rehearsal.second_device import NAME


@contextmanager
def in_place() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Inside, they are; and inside what is given, they are not, for a model that is captured."""
    plain = {name: getattr(F, name) for name in STAND_INS}
    with ExitStack() as stack:
        for name, made in STAND_INS.items():
            stack.enter_context(patch.object(F, name, made(plain[name])))

        @contextmanager
        def none_in_place() -> Iterator[None]:
            with patch.multiple(F, **plain):
                yield

        yield none_in_place


class _Attention(torch.autograd.Function):
    """Keeps the result and the log-sum-exp of each row with queries, keys and values, and no scores
    (Dao et al. 2022, FlashAttention, algorithm 1)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        mixed = q.new_empty(*q.shape[:-1], v.shape[-1])
        sums = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, mixed, sums, *([] if mask is None else [mask]))
        return mixed

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        q, k, v, _, _, *masks = ctx.saved_tensors
        of_mask = torch.empty_like(masks[0]) if ctx.needs_input_grad[3] else None
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), of_mask


def attention(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`F.scaled_dot_product_attention`; where all kernels but that of scores are switched off,
    ``plain``."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *given: Any,
        **more: Any,
    ) -> Tensor:
        of = torch.backends.cuda  # as `torch.nn.attention.sdpa_kernel` has it
        kinds = of.flash_sdp_enabled, of.mem_efficient_sdp_enabled, of.cudnn_sdp_enabled
        asked = any(enabled() for enabled in kinds)  # type: ignore[no-untyped-call]
        if query.device.type != NAME or not asked:
            return plain(query, key, value, attn_mask, *given, **more)
        mixed: Tensor = apply(_Attention, query, key, value, attn_mask)
        return mixed

    return attend


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        rows = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, rows, *([] if weight is None else [weight]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        x, _, *weights = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weights[0]) if weights else None


def rms_norm(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`F.rms_norm` over the last dim in one dtype."""

    def norm(
        input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        alike = weight is None or weight.dtype is input.dtype
        if input.device.type != NAME or len(normalized_shape) != 1 or not alike:
            return plain(input, normalized_shape, weight, eps)
        normed: Tensor = apply(_RMSNorm, input, weight)
        return normed

    return norm


def dropout(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`F.dropout`, which keeps one byte an element."""

    def dropped(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if input.device.type != NAME or inplace or not training or not 0.0 < p < 1.0:
            return plain(input, p, training, inplace)
        made: Tensor = torch.native_dropout(input, p, True)[0]
        return made

    return dropped


STAND_INS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "scaled_dot_product_attention": attention,
    "rms_norm": rms_norm,
    "dropout": dropout,
}
"""By the name of a function of `torch.nn.functional`, from that what is in its place."""
