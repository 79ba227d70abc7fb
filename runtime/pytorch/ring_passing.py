"""How pieces of keys and values come to a rank, and the sums of their gradients home."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from autopar.runtime.pytorch import transport


class Carrier(Protocol):
    """How pieces of keys and values, each pair in one flat tensor, come to who computes with them:
    the own one first."""

    def holds(self) -> Tensor | None:
        """The own pair, where it stays until backward anyhow."""

    def around(self, pair: Tensor, visit: Callable[[Tensor], object]) -> None:
        """``visit`` of each piece; ``pair``: the own one."""

    def there_and_back(self, pair: Tensor, visit: Callable[[Tensor], Tensor]) -> Tensor:
        """The same, where ``visit`` returns a part of its piece's gradient: the sum of all parts
        for the own piece."""


class Passing(NamedTuple):
    """Pieces that pass along axes, ``rounds`` of each."""

    axes: tuple[str, ...]
    rounds: tuple[int, ...]

    def holds(self) -> Tensor | None:
        return None

    def around(self, pair: Tensor, visit: Callable[[Tensor], object]) -> None:
        _around(pair, self.axes, self.rounds, visit)

    def there_and_back(self, pair: Tensor, visit: Callable[[Tensor], Tensor]) -> Tensor:
        return _there_and_back(pair, self.axes, self.rounds, visit)


def _around(
    pair: Tensor, axes: Sequence[str], around: Sequence[int], visit: Callable[[Tensor], object]
) -> None:
    """``visit`` of each piece, this rank's own first, while the next one comes."""
    if not axes:
        visit(pair)
        return
    for back in range(around[0]):
        more = back + 1 < around[0]
        coming = transport.begin_shift(pair, axes[0]) if more else None
        _around(pair, axes[1:], around[1:], visit)
        if coming is not None:
            pair = transport.wait(coming)


def _there_and_back(
    pair: Tensor, axes: Sequence[str], around: Sequence[int], visit: Callable[[Tensor], Tensor]
) -> Tensor:
    """`_around`, where ``visit`` returns this rank's part of its piece's gradient: the sum of all
    ranks' parts for the own piece.

    The sum for a piece begins on the rank after its own, follows the piece, and goes home from the
    last one that sees it.
    """
    if not axes:
        return visit(pair)
    axis = axes[0]
    own: Tensor | None = None
    behind: Tensor | None = None
    for back in range(around[0]):
        more = back + 1 < around[0]
        coming = transport.begin_shift(pair, axis) if more else None
        part = _there_and_back(pair, axes[1:], around[1:], visit)
        if back == 0:
            own = part
        else:
            if behind is not None:
                part = part + transport.wait(behind)
            behind = transport.begin_shift(part, axis, 1 if more else -back)
        if coming is not None:
            pair = transport.wait(coming)
    assert own is not None
    return own if behind is None else own + transport.wait(behind)


def joined(k: Tensor, v: Tensor) -> Tensor:
    """Both in one flat tensor, which one shift sends."""
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def taken_apart(pair: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a flat tensor in the shapes of ``k`` and ``v``."""
    return pair[: k.numel()].view(k.shape), pair[k.numel() :].view(v.shape)
