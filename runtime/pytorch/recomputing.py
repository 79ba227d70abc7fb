"""Running a block's forward again in backward instead of keeping what it made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autopar.nouns.recompute import COMPUTE, FULL, SELECTIVE
from autopar.runtime.pytorch.torch_private import functional_collectives

Context = AbstractContextManager[Any]

RUNNING = ("running_mean", "running_var")
"""Buffers that a forward changes: running it again must not change them again."""


def recompute(
    function: Callable[..., Any],
    *args: Any,
    keep_collectives: bool = False,
    keep_products: bool = False,
) -> Any:
    """``function(*args)``, whose forward runs again in backward.

    ``keep_collectives``: what its collectives gave is kept, so that they do not run again.
    ``keep_products``: so is also what products with a matrix, convolutions and attention gave,
    attention in kernels that do not write the scores out.
    """
    policy = _products if keep_products else _collectives if keep_collectives else None
    for seen in _watched:
        seen[SELECTIVE if keep_products else COMPUTE if keep_collectives else FULL] += 1

    def contexts() -> tuple[Context, Context]:
        forward: Context = nullcontext()
        again: Context = nullcontext()
        if policy is not None:
            forward, again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return forward, _unchanged(function, again)

    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


_watched: list[Counter[str]] = []


@contextmanager
def recomputations() -> Iterator[Counter[str]]:
    """How often blocks are called inside that recompute, by `autopar.nouns.recompute.RECOMPUTE`."""
    seen: Counter[str] = Counter()
    _watched.append(seen)
    try:
        yield seen
    finally:
        _watched.remove(seen)


@contextmanager
def _unchanged(function: Callable[..., Any], inner: Context) -> Iterator[None]:
    """``inner``, after which the running statistics of a module are what they were before."""
    modules = function.modules() if isinstance(function, nn.Module) else ()
    held = [m._buffers[name] for m in modules for name in RUNNING if name in m._buffers]
    before = [(b, b.clone()) for b in held if b is not None]
    try:
        with inner:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


_COLLECTIVES = frozenset(
    getattr(functional_collectives, name).default
    for name in (
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "wait_tensor",
    )
)


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "linear",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
)
"""Batched products are not among them: those of attention that is written out make the scores."""


def _collectives(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in _COLLECTIVES
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in _PRODUCTS or op in _COLLECTIVES
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
