"""Exact dynamic programming over a tree decomposition, with prices on memory.

Without a usage limit that bites, one elimination of the shrunk problem gives the optimum
(``tree_decomposition``).  With one, memory is priced and the problem is split
(``branch_and_bound``).

Graphs too wide for exact tables get mini-buckets: weaker bounds and good guesses.
"""

from __future__ import annotations

from autopar.searchers.branch_and_bound import branch_and_bound
from autopar.searchers.run import Run
from autopar.searchers.starts import LARGE, first_answer, shrunk


def search(run: Run, seed: int) -> None:
    """Exact where the graph is narrow; see the module.  The seed is not used."""
    del seed
    ready = shrunk(run)
    if ready is not None:
        model, lift = ready
        if model.start[-1] > LARGE:
            first_answer(run, model, lift)
        branch_and_bound(run, model, lift)
