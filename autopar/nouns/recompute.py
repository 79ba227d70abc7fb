"""What blocks run again in backward instead of keeping what their forward made.

``none``          nothing.
``selective-op``  all but products with a matrix, convolutions, attention and collectives.
``compute``       all but collectives.
``full``          everything.

``selective``     what trainers call so: the attention core, or the modules that are named. It is
                  priced for architectures by figures; no program does it.

The experts that a token goes to are found once, whatever runs again.

Where memory lies between two of them, the blocks that a stage calls first do more:
``compute x 5 + selective-op``. A published run may name modules, ``selective(layernorm+moe_act)``,
or a share of the layers, ``full x 0.3``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.nouns.graph import Graph

POLICIES = ("none", "selective-op", "compute", "full")
"""What a block may do, from the most memory to the least."""
NONE, SELECTIVE, COMPUTE, FULL = POLICIES
ATTENTION = "selective"
_MIXED = re.compile(rf"({COMPUTE}|{FULL}) x ([1-9][0-9]{{0,11}}) \+ {SELECTIVE}")
_PRICED = re.compile(rf"({NONE}|{ATTENTION}|{FULL})(?:\(([a-z_+]+)\))?(?: x (0\.[0-9]+))?")


@dataclass(frozen=True, slots=True)
class Recompute:
    """What the blocks of a stage do.

    policy: of the blocks that are called first.
    count:  calls that do so, the others `SELECTIVE`; None: all calls.
    share, modules: of layers that do so, and what of a layer under `ATTENTION` (empty: what the
        software does); of published runs alone.
    """

    policy: str = NONE
    count: int | None = None
    share: float = 1.0
    modules: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> Recompute:
        """The inverse of ``str``.

        Raises:
            ValueError: there is nothing of that name.
        """
        match = _MIXED.fullmatch(text)
        if match is not None:
            return Recompute(match[1], int(match[2]))
        if text in POLICIES:
            return Recompute(text)
        match = _PRICED.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is none of {', '.join(POLICIES)}, and no mix of them")
        modules = tuple(match[2].split("+")) if match[2] else ()
        return Recompute(match[1], share=float(match[3] or 1.0), modules=modules)

    @staticmethod
    def mixed(heavy: str, count: int, calls: int) -> Recompute:
        """``compute`` or ``full`` for the first ``count`` of so many calls of blocks,
        ``selective-op`` for the others."""
        if not count:
            return Recompute(SELECTIVE)
        return Recompute(heavy, None if count >= calls else count)

    @property
    def runs_again(self) -> bool:
        """Whether any block runs anything again."""
        return self.policy != NONE

    @property
    def emitted(self) -> bool:
        """Whether programs can do so."""
        return self.policy in POLICIES and self.share == 1.0 and not self.modules

    def by_call(self, calls: int) -> tuple[str, ...]:
        """The policy of each of a stage's calls of blocks."""
        count = calls if self.count is None else min(calls, self.count)
        return (self.policy,) * count + (SELECTIVE,) * (calls - count)

    def within(self, first: int, calls: int) -> Recompute:
        """What ``calls`` calls from the ``first`` on do."""
        if self.count is None:
            return self
        return Recompute.mixed(self.policy, max(0, min(calls, self.count - first)), calls)

    def __str__(self) -> str:
        if self.count is not None:
            return f"{self.policy} x {self.count} + {SELECTIVE}"
        modules = f"({'+'.join(self.modules)})" if self.modules else ""
        return self.policy + modules + ("" if self.share == 1.0 else f" x {self.share!r}")


KEEP_ALL = Recompute()
"""Everything is kept."""


def policies(framework: str) -> tuple[str, ...]:
    """Of `POLICIES`, what there is: JAX programs keep under ``none`` what ``selective-op`` does,
    since XLA makes the rest again in the kernels that read it."""
    return tuple(name for name in POLICIES if framework != "jax" or name != SELECTIVE)


def keeps_routes(body: Graph) -> bool:
    """Whether a block finds the experts of its tokens once, and keeps them under any policy."""
    return any(op.kind == "experts" for op in body.ops)
