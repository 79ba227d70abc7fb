"""Dropout of tensors that model axes split: every rank draws for its own piece.

Ranks along a model axis share one stream of random numbers, so that what they hold whole is dropped
alike. Where they hold pieces, numbers of that stream would give every piece the same mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from autopar.runtime.pytorch import ranks
from autopar.runtime.pytorch.accelerators import is_accelerator, module_of

_SEEDS = 1 << 62


@contextmanager
def own_draws(axes: str | Sequence[str]) -> Iterator[None]:
    """Inside, ranks along ``axes`` draw different numbers; afterwards they draw alike again.

    The numbers follow from one draw of the shared stream and from the rank's place, so a block that
    runs again in backward draws what it drew, and pieces of different sizes do no harm.
    """
    here = ranks.current()
    place = here.index(*((axes,) if isinstance(axes, str) else axes))
    seed = int(torch.empty((), dtype=torch.int64).random_(_SEEDS)) + place
    drawn_from = stream(here.device)
    shared = drawn_from.get_state()
    drawn_from.manual_seed(seed)
    try:
        yield
    finally:
        drawn_from.set_state(shared)


def stream(device: torch.device) -> torch.Generator:
    """What functions without a generator draw from on this device."""
    if not is_accelerator(device):
        return torch.default_generator
    of = module_of(device)
    number = of.current_device() if device.index is None else device.index
    generator: torch.Generator = of.default_generators[number]
    return generator


def drawn_apart(
    axes: str | Sequence[str], function: Callable[..., Tensor], *args: object
) -> Tensor:
    """``function(*args)`` with `own_draws`.

    Never compiled: a compiled graph cannot change the stream that it draws from.
    """
    drawn: Tensor = _drawn(axes, function, *args)
    return drawn


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _drawn(axes: str | Sequence[str], function: Callable[..., Tensor], *args: object) -> Tensor:
    with own_draws(axes):
        return function(*args)


def dropout(
    x: Tensor,
    p: float,
    training: bool = True,
    *,
    axis: str | Sequence[str],
    features: bool = False,
    alpha: bool = False,
) -> Tensor:
    """`F.dropout` of a piece of a tensor that the ranks of ``axis`` split.

    ``features``: of x [b, c, *s], whole features are dropped; ``alpha``: as `F.alpha_dropout` does.
    """
    if not (p and training):
        return x
    return drawn_apart(axis, _FUNCTIONS[features, alpha], x, p, True)


_FUNCTIONS: Mapping[tuple[bool, bool], Callable[..., Tensor]] = {
    (False, False): torch.dropout,
    (True, False): torch.feature_dropout,
    (False, True): torch.alpha_dropout,
    (True, True): torch.feature_alpha_dropout,
}
"""By (features, alpha)."""
