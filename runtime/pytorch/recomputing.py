"""Running a block's forward again in backward instead of keeping what it made."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autopar.nouns import costly
from autopar.nouns.recompute import COMPUTE, FULL, SELECTIVE
from autopar.runtime.pytorch import ring_results, scaled_op
from autopar.runtime.pytorch.made_again import inside
from autopar.torch_private.modules import buffers_of
from autopar.torch_private.ops import functional_collectives, schema_of

Context = AbstractContextManager[Any]
assert scaled_op.NAME in costly.BY_MATRIX.torch  # and is defined

RUNNING = ("running_mean", "running_var")
"""Buffers that a forward changes: running it again must not change them again."""


def recompute(
    function: Callable[..., Any],
    *args: Any,
    keep_collectives: bool = False,
    keep_products: bool = False,
    keep_routes: bool = False,
    updated: Sequence[int] = (),
) -> Any:
    """``function(*args)``, whose forward runs again in backward.

    ``keep_collectives``: what its collectives gave is kept, so that they do not run again.
    ``keep_products``: so is also what products with a matrix, convolutions and attention gave,
    attention in kernels that do not write the scores out.
    ``keep_routes``: so are the best few of rows. Found again they could be others where two are
    almost equal, and tokens would go back by other experts than they came.
    ``updated``: the arguments, by number, that the forward writes: running statistics.
    """
    policy = _products if keep_products else _collectives if keep_collectives else None
    rings = policy is not None
    if keep_routes:
        policy = partial(_routes, policy)
    for seen in _watched:
        seen[SELECTIVE if keep_products else COMPUTE if keep_collectives else FULL] += 1

    held = [*_running(function), *(args[i] for i in updated)]
    if updated:
        function, args = _without(function, args, updated)
    selective = partial(create_selective_checkpoint_contexts, policy)
    if rings and not torch.compiler.is_compiling():
        selective = partial(_with_rings, selective)

    def unchanged() -> tuple[Context, Context]:
        forward, again = (nullcontext(), nullcontext()) if policy is None else selective()
        return forward, _unchanged(held, again)

    # `torch.compile` reads ``selective``, and no closure.
    contexts = unchanged if held else None if policy is None else selective
    given: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(function, *args, use_reentrant=False, **given)


def _with_rings(selective: Callable[[], tuple[Context, Context]]) -> tuple[Context, Context]:
    """Keeps what attention around a ring gave, too."""
    results: deque[ring_results.Result] = deque()
    forward, again = selective()
    return _both(forward, ring_results.kept(results, False, forward)), _both(
        again, ring_results.kept(results, True, again)
    )


@contextmanager
def _both(outer: Context, inner: Context) -> Iterator[None]:
    with outer, inner:
        yield


_watched: list[Counter[str]] = []


@contextmanager
def recomputations() -> Iterator[Counter[str]]:
    """How often blocks are called inside that recompute, by `autopar.nouns.recompute.RECOMPUTE`."""
    seen: Counter[str] = Counter()
    _watched.append(seen)
    try:
        yield seen
    finally:
        _watched.pop()


def _running(function: Callable[..., Any]) -> list[torch.Tensor]:
    """Running statistics of a module."""
    modules = function.modules() if isinstance(function, nn.Module) else ()
    held = [buffers_of(m)[name] for m in modules for name in RUNNING if name in buffers_of(m)]
    return [b for b in held if b is not None]


def _without(
    function: Callable[..., Any], args: Sequence[Any], updated: Sequence[int]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """``function`` of its other arguments, and these: what is written may not be among those that
    a checkpoint saves."""
    written = {i: args[i] for i in updated}

    def called(*others: Any) -> Any:
        rest = iter(others)
        return function(*(written[i] if i in written else next(rest) for i in range(len(args))))

    return called, tuple(a for i, a in enumerate(args) if i not in written)


@contextmanager
def _unchanged(held: Sequence[torch.Tensor], inner: Context) -> Iterator[None]:
    """``inner``, after which running statistics are what they were before."""
    before = [(b, b.clone()) for b in held]
    try:
        with inner:
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


_COLLECTIVES = frozenset(
    getattr(functional_collectives, name).default for name in costly.COLLECTIVES.torch
)


def _op(name: str) -> Any:
    library, _, own = name.rpartition("::")
    return getattr(getattr(torch.ops, library or "aten"), own).default


_COSTLY = frozenset(_op(name) for row in costly.TABLE for name in row.torch)
_ATTENTION = {
    op: [argument.name for argument in schema_of(op).arguments].index("dropout_p")
    for op in (getattr(torch.ops.aten, name).default for name in costly.ATTENTION.torch)
}
"""With the place of the probability of dropout among the arguments."""


def _routes(inner: Any, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """``inner``, but for the best few of rows."""
    if op is torch.ops.aten.topk.default:
        return CheckpointPolicy.MUST_SAVE
    if inner is None:
        return CheckpointPolicy.PREFER_RECOMPUTE
    policy: CheckpointPolicy = inner(context, op, *args, **kwargs)
    return policy


def _collectives(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in _COLLECTIVES and not inside()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    place = _ATTENTION.get(op)
    kept = op in _COSTLY or op in _COLLECTIVES
    if place is not None:
        kept = not kwargs.get("dropout_p", args[place] if len(args) > place else 0.0)
    kept = kept and not inside()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
