"""What blocks run again in backward instead of keeping what their forward made.

``none``          nothing.
``selective-op``  all but products with a matrix, convolutions, attention and collectives.
``compute``       all but collectives.
``full``          everything.

The experts that a token goes to are found once, whatever runs again.

Where memory lies between two of them, the blocks that a stage calls first do more:
``compute x 5 + selective-op``.
"""

from __future__ import annotations

import re

from autopar.nouns.graph import Graph

RECOMPUTE = ("none", "selective-op", "compute", "full")
"""What all blocks of a stage may do, from the most memory to the least."""
NONE, SELECTIVE, COMPUTE, FULL = RECOMPUTE
_MIXED = re.compile(rf"({COMPUTE}|{FULL}) x ([1-9]\d*) \+ {SELECTIVE}")


def policies(framework: str) -> tuple[str, ...]:
    """Of `RECOMPUTE`, what there is: JAX programs keep under ``none`` what ``selective-op`` does,
    since XLA makes the rest again in the kernels that read it."""
    return tuple(name for name in RECOMPUTE if framework != "jax" or name != SELECTIVE)


def keeps_routes(body: Graph) -> bool:
    """Whether a block finds the experts of its tokens once, and keeps them under any policy."""
    return any(op.kind == "experts" for op in body.ops)


def mixed(heavy: str, count: int, calls: int) -> str:
    """``compute`` or ``full`` for the first ``count`` of so many calls of blocks, ``selective-op``
    for the others."""
    if not count:
        return SELECTIVE
    return heavy if count >= calls else f"{heavy} x {count} + {SELECTIVE}"


def by_call(recompute: str, calls: int) -> tuple[str, ...]:
    """What each of a stage's calls of blocks does."""
    match = _MIXED.fullmatch(recompute)
    if match is None:
        return (recompute,) * calls
    count = min(calls, int(match[2]))
    return (match[1],) * count + (SELECTIVE,) * (calls - count)


def within(recompute: str, first: int, calls: int) -> str:
    """What ``calls`` calls from the ``first`` on do, as one text."""
    match = _MIXED.fullmatch(recompute)
    if match is None:
        return recompute
    return mixed(match[1], max(0, min(calls, int(match[2]) - first)), calls)


def most(recompute: str) -> str:
    """What the blocks do that do most."""
    match = _MIXED.fullmatch(recompute)
    return recompute if match is None else match[1]


def is_known(recompute: str) -> bool:
    return recompute in RECOMPUTE or _MIXED.fullmatch(recompute) is not None
