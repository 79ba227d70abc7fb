"""Collectives that XLA need not run: of equal ones all but one, and gathers of one number.

A statistic that two readers want whole is one sum in the compiled step, however often the program
asks for it; the same gather of constants in two layers is one too, and what every microbatch moves
alike is moved once, before their loop. Compiled without the passes that do so, common
sub-expressions and loop-invariant code, the step has to move exactly what was priced; with them,
less and nothing else. What all layers of a loop are given alike, such as a mask, jax itself moves
once before the loop where a derivative is taken. A gather of one number in all places, as the
gradient of a sum is, XLA's simplifier makes that number in more places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.lowering.collectives import Row
from autopar.runtime.verify.collectives import differences, missing

_GIVEN_ALIKE = re.compile(r"::shared\d* forward$")
_OFF = "xla_disable_hlo_passes"
Options = Mapping[str, str]
APART: Options = {_OFF: "cse,while-loop-invariant-code-motion"}
"""Options of a compiler that leaves equal ops where they stand."""
AS_WRITTEN: Options = {_OFF: f"{APART[_OFF]},algsimp"}
"""Of one that simplifies nothing either."""


def joined(
    priced: Sequence[Row], issued: Sequence[Row], under: Callable[[Options], Sequence[Row]]
) -> tuple[str, ...]:
    """``all_reduce over tp, 64 bytes a step``, one for each kind and axis, where what XLA need not
    run explains every difference of ``issued`` from ``priced``; else nothing.

    under: what the step issues under options of the compiler.
    """
    less = missing(priced, issued)
    if not less or missing(issued, priced):
        return ()
    for options in (APART, AS_WRITTEN):
        moved = under(options)
        if not differences(priced, moved) or not differences(_before_loops(priced), moved):
            return tuple(
                f"{kind} over {axis}, {size} bytes a step" for (_, kind, axis), size in less.items()
            )
    return ()


def _before_loops(priced: Sequence[Row]) -> list[Row]:
    """With what every layer of a block is given alike moved once."""
    return [replace(r, count=1) if _GIVEN_ALIKE.search(r.what) else r for r in priced]
