"""Integer programs of few columns, solved by HiGHS in this process, as scipy has it.

A child process (`autopar.searchers.highs`) takes longer to start than such a program to solve, and
so does MathOpt to import; what plans has scipy loaded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autopar.searchers.highs import Answer
from autopar.searchers.linear_rows import Program

COLUMNS = 500
"""Up to which a program is small: it takes some hundredths of a second."""
_OPTIMAL, _INFEASIBLE = 0, 2
"""What `scipy.optimize.milp` calls it."""


def is_small(made: Program) -> bool:
    """Of its size alone, so that the same program is always solved in the same way."""
    return 0 < len(made.cost) <= COLUMNS


def solve_here(made: Program, limit_s: float, nodes: int | None, relative_gap: float) -> Answer:
    """As `autopar.searchers.highs.solve`; nothing stops it but its limits."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    row, column, value = made.entries
    shape = len(made.row_upper), len(made.cost)
    matrix = csr_array((value, (row, column)), shape=shape)
    options: dict[str, Any] = {"time_limit": limit_s, "mip_rel_gap": relative_gap}
    if nodes is not None:
        options["node_limit"] = nodes
    result = milp(
        made.cost,
        integrality=(np.arange(shape[1]) < made.labels).astype(int),
        bounds=Bounds(0.0, made.upper),
        constraints=LinearConstraint(matrix, made.row_lower, made.row_upper),
        options=options,  # type: ignore[arg-type]
    )
    if result.status == _INFEASIBLE:
        return Answer("infeasible", math.inf, None)
    bound = -math.inf if result.mip_dual_bound is None else result.mip_dual_bound + made.offset
    if result.x is None:
        return Answer("stopped", bound, None)
    status = "optimal" if result.status == _OPTIMAL else "stopped"
    return Answer(status, bound, result.x[: made.labels], int(result.mip_node_count or 0))
