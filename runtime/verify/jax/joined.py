"""Equal collectives, of which XLA runs one.

A statistic that two readers want whole is one sum in the compiled step, however often the program
asks for it; the same gather of constants in two layers is one too, and what every microbatch moves
alike is moved once, before their loop. Compiled without the passes that do so, common
sub-expressions and loop-invariant code, the step has to move exactly what was priced; with them,
less and nothing else. What all layers of a loop are given alike, such as a mask, jax itself moves
once before the loop where a derivative is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.lowering.collectives import Row
from autopar.runtime.verify.collectives import differences, missing

_GIVEN_ALIKE = re.compile(r"::shared\d* forward$")
APART = {"xla_disable_hlo_passes": "cse,while-loop-invariant-code-motion"}
"""Options of a compiler that leaves equal ops where they stand."""


def joined(
    priced: Sequence[Row], issued: Sequence[Row], apart: Callable[[], Sequence[Row]]
) -> tuple[str, ...]:
    """``all_reduce over tp, 64 bytes a step``, one for each kind and axis, where equal collectives
    explain every difference of ``issued`` from ``priced``; else nothing.

    apart: what the step issues under `APART`.
    """
    less = missing(priced, issued)
    if not less or missing(issued, priced):
        return ()
    moved = apart()
    if differences(priced, moved) and differences(_before_loops(priced), moved):
        return ()
    return tuple(
        f"{kind} over {axis}, {size} bytes a step" for (_, kind, axis), size in less.items()
    )


def _before_loops(priced: Sequence[Row]) -> list[Row]:
    """With what every layer of a block is given alike moved once."""
    return [replace(r, count=1) if _GIVEN_ALIKE.search(r.what) else r for r in priced]
