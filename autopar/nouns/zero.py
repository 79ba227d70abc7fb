"""The levels of ZeRO: what each splits over ``dp_shard``, and what it moves for that.

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

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Zero:
    """A level, and whether it splits each kind of state."""

    level: int
    optimizer: bool
    gradients: bool
    parameters: bool

    def gathers(self, microbatches: int) -> int:
        """How often in a step parameters are gathered for forward; for backward as often again
        where they are split themselves."""
        return microbatches if self.parameters else int(self.optimizer)

    def reductions(self, microbatches: int) -> int:
        """How often in a step gradients are reduced."""
        return microbatches if self.gradients else 1

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
    """What ``level`` does on ``shard`` ranks of ``dp_shard``: nothing on one."""
    return ZERO[level if shard > 1 else 0]
