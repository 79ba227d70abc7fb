"""What an emitted program of several stages says of them: ``VALUES`` and ``STAGES``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

LOSS = "loss"
"""The name under which a stage gives its share of the loss."""


@dataclass(frozen=True, slots=True)
class Value:
    """What travels between stages.

    shape:    the local piece of one rank, for one microbatch.
    dtype:    the one in which it travels, under the precision of the program (``bfloat16``).
    gradient: whether one comes back; integers have none.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    gradient: bool = True


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the model that one pipeline rank runs.

    module: makes it; ``module(*takes)`` gives one tensor, or a tuple in the order of ``gives``.
    rank:   the place on the axis ``pp``.
    takes:  entries of the local batch, values of earlier stages, or ``counts`` (the sums over the
            global batch that the stage's own ``counts(batch)`` asks for).
    gives:  values, and ``loss``: its share of the loss of this microbatch.
    zero, recompute, units: where they are not those of ``SETTINGS``; a stage that recomputes has
            its I and W played as one B.
    """

    module: Callable[[], nn.Module]
    rank: int
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    zero: int | None = None
    recompute: str | None = None
    units: tuple[str, ...] | None = None
