"""The levels of ZeRO: what each splits over the axes that share state, and what it moves for that.

=====  =================  ===================================  =============================
level  split between      parameters are gathered              gradients are reduced
       steps
=====  =================  ===================================  =============================
0      nothing            never                                all_reduce, once a step
1      optimizer state    once a step                          reduce_scatter, once a step
2      + gradients        once a step                          reduce_scatter, each
                                                               microbatch
3      + parameters       for forward and for backward of      reduce_scatter, each
                          each microbatch                      microbatch
=====  =================  ===================================  =============================

(Rajbhandari et al. 2020, section 5.) What is reduced is then all-reduced over ``dp_replicate``,
once a step. Lowering, prices, memory and reports read this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autopar.nouns.axes import REPLICATE, SHARD

What = Literal["forward", "backward", "gradients", "replicas"]


@dataclass(frozen=True, slots=True)
class Move:
    """What a piece of state costs: ``count`` collectives of a ``kind`` over ``axis`` in a step.

    what: parameters for forward or backward, gradients, or their pieces between replicas.
    """

    what: What
    kind: str
    axis: str
    count: int


@dataclass(frozen=True, slots=True)
class Zero:
    """A level, and whether it splits each kind of state."""

    level: int
    optimizer: bool
    gradients: bool
    parameters: bool

    def gathers(self, microbatches: int) -> int:
        """How often in a step parameters are gathered for forward."""
        return microbatches if self.parameters else int(self.optimizer)

    def moves(self, microbatches: int, sharing: str = SHARD) -> Iterator[Move]:
        """Of a level that splits anything, in the order of a step; ``sharing``: the axes that share
        state, as ``"dp_shard+cp"``."""
        gathers = self.gathers(microbatches)
        yield Move("forward", "all_gather", sharing, gathers)
        if self.parameters:
            yield Move("backward", "all_gather", sharing, gathers)
        reductions = microbatches if self.gradients else 1
        yield Move("gradients", "reduce_scatter", sharing, reductions)
        yield Move("replicas", "all_reduce", REPLICATE, 1)

    def __str__(self) -> str:
        """What is split."""
        if self.parameters:
            return "everything"
        if self.gradients:
            return "optimizer state and gradients"
        return "optimizer state" if self.optimizer else "nothing"


ZERO = (
    Zero(0, optimizer=False, gradients=False, parameters=False),
    Zero(1, optimizer=True, gradients=False, parameters=False),
    Zero(2, optimizer=True, gradients=True, parameters=False),
    Zero(3, optimizer=True, gradients=True, parameters=True),
)
ZERO_LEVELS = tuple(zero.level for zero in ZERO)


def over(level: int, shard: int) -> Zero:
    """What ``level`` does on ``shard`` ranks that share state: nothing on one."""
    return ZERO[level if shard > 1 else 0]
