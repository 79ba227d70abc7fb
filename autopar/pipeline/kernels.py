"""The inner loops of `autopar.pipeline.clock` and `autopar.pipeline.cuts`, compiled.

``actions`` and ``sends`` are `clock._Actions` and `clock._Sends`. Imported with the first of
them: a plan of one stage needs no compiler.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import numba
import numpy as np

jit = numba.njit(cache=True, nogil=True)

BLOCK = 8
"""Columns that are played at once: as many as stay near the processor."""


@jit
def order(actions, sends, microbatches):
    """Actions in an order in which each stands behind what it needs; fewer where lists wait for
    one another."""
    rank, stage, pass_, microbatch, _ = actions
    needs_at, source, _, _, _, _, _ = sends
    stages = (len(needs_at) - 1) // 2
    ranks = rank[-1] + 1 if len(rank) else 0
    begin = np.zeros(ranks + 1, np.intp)
    for r in rank:
        begin[r + 1] += 1
    for r in range(ranks):
        begin[r + 1] += begin[r]
    place = begin.copy()
    done = np.zeros((2 * stages, microbatches), np.bool_)
    made = np.empty(len(rank), np.intp)
    count = 0
    moved = True
    while moved:
        moved = False
        for r in range(ranks):
            while place[r] < begin[r + 1]:
                k = place[r]
                if pass_[k] < 2:
                    row = pass_[k] * stages + stage[k]
                    ready = True
                    for e in range(needs_at[row], needs_at[row + 1]):
                        if not done[pass_[k] * stages + source[e], microbatch[k]]:
                            ready = False
                    if not ready:
                        break
                    done[row, microbatch[k]] = True
                made[count] = k
                count += 1
                place[r] += 1
                moved = True
    return made[:count]


@jit
def times(order, actions, sends, costs, sends_s, links, microbatches):
    """For [ranks, columns] when each rank ends and begins, for [stages, columns] the end of the
    last action that is no forward and sends no more."""
    rank, stage, pass_, microbatch, cost = actions
    needs_at, _, arrives, gives_at, wire, link, pair = sends
    stages = (len(needs_at) - 1) // 2
    ranks = rank[-1] + 1 if len(rank) else 0
    columns = costs.shape[1]
    ends, begins = np.zeros((ranks, columns)), np.zeros((ranks, columns))
    ended = np.zeros((stages, columns))
    wires = wire.max() + 1 if len(wire) else 0
    arrived = np.zeros((wires * microbatches, BLOCK))
    free, busy = np.zeros((ranks, BLOCK)), np.zeros((links, BLOCK))
    begun = np.zeros(ranks, np.bool_)
    now = np.zeros(BLOCK)
    for left in range(0, columns, BLOCK):
        width = min(BLOCK, columns - left)
        begun[:] = False
        free[:] = 0.0
        busy[:] = 0.0
        for k in order:
            r, i = rank[k], microbatch[k]
            for c in range(width):
                now[c] = free[r, c]
            row = pass_[k] * stages + stage[k]
            if pass_[k] < 2:
                for e in range(needs_at[row], needs_at[row + 1]):
                    if arrives[e] >= 0:
                        place = arrives[e] * microbatches + i
                        for c in range(width):
                            now[c] = max(now[c], arrived[place, c])
            if not begun[r]:
                begun[r] = True
                for c in range(width):
                    begins[r, left + c] = now[c]
            for c in range(width):
                now[c] += costs[cost[k], left + c]
                free[r, c] = now[c]
            if pass_[k] < 2:
                for e in range(gives_at[row], gives_at[row + 1]):
                    line, place = link[e], wire[e] * microbatches + i
                    for c in range(width):
                        busy[line, c] = max(now[c], busy[line, c]) + sends_s[pair[e], left + c]
                        arrived[place, c] = busy[line, c]
            if pass_[k] > 0:  # the last one stays: W is behind its I
                for c in range(width):
                    ended[stage[k], left + c] = now[c]
        for r in range(ranks):
            for c in range(width):
                ends[r, left + c] = free[r, c]
    return ends, begins, ended


@jit
def least_fill(busy, fill, kind, bound):
    """The least sum of ``fill`` of a chain of stages whose ``busy`` is within ``bound``, and their
    ends; infinite where there is none.

    busy, fill: [kinds, end, width - 1] of the run of ``width`` units before ``end``; kind: of every
                stage. Of equal sums the one of the shortest last stages.
    """
    ends, widest = busy.shape[1], busy.shape[2]
    stages = len(kind)
    reach = np.full(ends, np.inf)
    reach[0] = 0.0
    came = np.zeros((stages, ends), np.intp)
    for stage in range(stages):
        own = kind[stage]
        behind = np.full(ends, np.inf)
        # every stage before and behind it has a unit at least
        for end in range(stage + 1, ends - (stages - 1 - stage)):
            for width in range(min(end - stage, widest)):
                if busy[own, end, width] <= bound:
                    through = reach[end - 1 - width] + fill[own, end, width]
                    if through < behind[end]:
                        behind[end] = through
                        came[stage, end] = width
        reach = behind
    chosen = np.zeros(stages, np.intp)
    at = ends - 1
    for stage in range(stages - 1, -1, -1):
        chosen[stage] = at
        at -= 1 + came[stage, at]
    return reach[-1], chosen
