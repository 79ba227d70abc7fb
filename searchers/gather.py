"""The one rewriting that exact shrinking is made of, and its way back.

A *gather* gives every old variable v a new variable ``var_of[v]`` and says, for each label l of
the new one, which old label it stands for: ``source_v(l)``.  Removing labels (v keeps its own
variable and fewer labels), merging variables whose choices force each other (several v share one
variable) and reordering are all gathers.  The new costs are sums of old cells,

    unary'_w(l)      = sum_{v -> w} unary_v(source_v(l))
                       + sum_{a,b -> w} edge_ab(source_a(l), source_b(l))
    edge'_wz(l, k)   = sum_{a -> w, b -> z} edge_ab(source_a(l), source_b(k))

so the cost of a new choice is the cost of the old choice ``x_v = source_v(x'_{var_of[v]})``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autopar.nouns.problem import Ints, offsets
from autopar.searchers.model import Floats, Model, chunks, runs, scatter_add, unique_edges

Lift = Callable[[Ints], Ints]
"""Turns a choice for the smaller model into one for the larger, of equal cost and memory."""


def gather(m: Model, var_of: Ints, source: Ints, new_sizes: Ints) -> tuple[Model, Lift]:
    """Apply a gather; ``source`` holds source_v for v = 0, 1, ... one behind the other."""
    source_start = offsets(new_sizes[var_of])
    start = offsets(new_sizes)
    new_label = runs(start[var_of], new_sizes[var_of])
    old_label = source + np.repeat(m.start[:-1], new_sizes[var_of])
    unary = scatter_add(new_label, m.unary[old_label], start[-1])

    ends = var_of[m.edge]
    rows, columns = new_sizes[ends[:, 0]], new_sizes[ends[:, 1]]
    inner = ends[:, 0] == ends[:, 1]
    for group, diagonal in ((np.flatnonzero(inner), True), (np.flatnonzero(~inner), False)):
        a, b = m.edge[group, 0], m.edge[group, 1]
        size = rows[group] if diagonal else rows[group] * columns[group]
        at = offsets(size)
        picked = np.empty(at[-1])
        for part in chunks(at):
            some, cells = group[part], size[part]
            place = runs(np.zeros(len(some), np.int64), cells)
            if diagonal:
                row = column = place
            else:
                row, column = np.divmod(place, np.repeat(columns[some], cells))
            a, b = m.edge[some, 0], m.edge[some, 1]
            cell = source[row + np.repeat(source_start[a], cells)]
            cell *= np.repeat(m.sizes[b], cells)
            cell += source[column + np.repeat(source_start[b], cells)]
            cell += np.repeat(m.edge_start[some], cells)
            picked[at[part.start] : at[part.stop]] = m.edge_cost[cell]
        if diagonal:
            unary += scatter_add(runs(start[ends[group, 0]], size), picked, start[-1])
        else:
            edge, edge_start, edge_cost = unique_edges(new_sizes, ends[group], at, picked)

    size = new_sizes[var_of[m.term_var]]
    entry = source[runs(source_start[m.term_var], size)] + np.repeat(m.term_start[:-1], size)
    smaller = Model(
        start=start,
        unary=unary,
        edge=edge,
        edge_start=edge_start,
        edge_cost=edge_cost,
        term_var=var_of[m.term_var],
        term_rows=m.term_rows,
        term_start=offsets(size),
        term_usage=m.term_usage[entry],
        room=m.room,
        moment=m.moment,
        constant=m.constant,
    )

    def lift(x: Ints) -> Ints:
        return np.asarray(source[source_start[:-1] + x[var_of]])

    return smaller, lift


def keep_labels(m: Model, keep: npt.NDArray[np.bool_]) -> tuple[Model, Lift]:
    """The model with only the labels where ``keep`` is true: a gather in which all stays in order.

    So cells are copied under a mask, and only edges of variables that lose labels are looked at.
    """
    start = offsets(np.add.reduceat(keep, m.start[:-1], dtype=np.int64))
    sizes = np.diff(start)
    loses = sizes < m.sizes
    stays = np.ones(len(m.edge_cost), np.bool_)
    touched = np.flatnonzero(loses[m.edge].any(axis=1))
    for part in chunks(offsets(np.diff(m.edge_start)[touched])):
        some = touched[part]
        a, b = m.edge[some, 0], m.edge[some, 1]
        rows = m.sizes[a]
        width = np.repeat(m.sizes[b], rows)
        inside = keep[runs(np.repeat(m.start[b], rows), width)]
        inside &= np.repeat(keep[runs(m.start[a], rows)], width)
        stays[runs(m.edge_start[some], np.diff(m.edge_start)[some])] = inside
    source = np.flatnonzero(keep) - np.repeat(m.start[:-1], sizes)
    smaller = replace(
        m,
        start=start,
        unary=m.unary[keep],
        edge_start=offsets(sizes[m.edge[:, 0]] * sizes[m.edge[:, 1]]),
        edge_cost=m.edge_cost[stays],
        term_start=offsets(sizes[m.term_var]),
        term_usage=m.term_usage[keep[m.term_label]],
    )

    def lift(x: Ints) -> Ints:
        return np.asarray(source[start[:-1] + x])

    return smaller, lift


def by_columns(m: Model, edges: slice) -> Floats:
    """The cells of consecutive edges, every matrix by columns."""
    rows, columns = m.sizes[m.edge[edges, 0]], m.sizes[m.edge[edges, 1]]
    length = np.repeat(rows, columns)
    step = np.repeat(np.repeat(columns, columns), length)
    step *= runs(np.zeros(len(length), np.int64), length)
    step += np.repeat(runs(m.edge_start[:-1][edges], columns), length)
    return np.asarray(m.edge_cost[step])


def _undominated(kept: Ints, room: Floats, lo: Ints, hi: Ints) -> Ints:
    """Of the ``kept`` rows those that no neighbour says already; terms go from row ``lo`` to the
    one before ``hi``."""
    while len(kept) > 1:
        # begins[i]: a term covers kept[i + 1] but not kept[i]; ends[i]: the other way round.
        first, last = np.searchsorted(kept, lo), np.searchsorted(kept, hi)
        used = first < last
        begins = np.bincount(first[used], minlength=len(kept) + 1)[1 : len(kept)] > 0
        ends = np.bincount(last[used], minlength=len(kept) + 1)[1 : len(kept)] > 0
        tight, next_tight = room[kept[:-1]], room[kept[1:]]
        drop_next = ~begins & (tight <= next_tight)
        drop_this = ~ends & (next_tight <= tight) & ~drop_next
        dropped = np.concatenate([[False], drop_next]) | np.concatenate([drop_this, [False]])
        # Dominance is transitive and runs one way along each pair of neighbours, so all of
        # these may go at once: each follows its chain to a row that stays.
        if not dropped.any():
            break
        kept = kept[~dropped]
    return kept


def tidy_memory(m: Model) -> Model:
    """The same memory constraint with fewer rows and terms.

    - The least usage of each term goes into ``room``; terms that are constant vanish.
    - A row that even the largest usages keep to is dropped.
    - A row is dropped when the next one kept has all its terms and no more room, or the other
      way round; only rows where something has just begun and is about to end survive.
    - Terms of one variable over the same rows are added up.
    """
    if not len(m.term_var):
        # Only room can say that nothing fits; keep the tightest row for that.
        short = np.flatnonzero(m.room < 0)[:1]
        return replace(m, room=m.room[short], moment=m.moment[short])
    rows = len(m.room)
    least = np.minimum.reduceat(m.term_usage, m.term_start[:-1])
    change = np.bincount(m.term_rows[:, 0], least, rows + 1)
    change -= np.bincount(m.term_rows[:, 1], least, rows + 1)
    room = m.room - np.cumsum(change)[:rows]
    usage = m.term_usage - np.repeat(least, np.diff(m.term_start))
    most = np.maximum.reduceat(usage, m.term_start[:-1])
    live = most > 0

    change = np.bincount(m.term_rows[live, 0], most[live], rows + 1)
    change -= np.bincount(m.term_rows[live, 1], most[live], rows + 1)
    kept = np.flatnonzero(np.cumsum(change)[:rows] > room)
    if (room < 0).any():
        kept = np.union1d(kept, [int(room.argmin())])
    lo, hi = m.term_rows[live, 0], m.term_rows[live, 1]
    kept = _undominated(kept, room, lo, hi)
    first, last = np.searchsorted(kept, lo), np.searchsorted(kept, hi)
    usable = first < last
    term = np.flatnonzero(live)[usable]
    key = np.stack([m.term_var[term], first[usable], last[usable]], axis=1)
    groups, slot = np.unique(key, axis=0, return_inverse=True)
    groups, slot = groups.reshape(-1, 3), slot.reshape(-1)
    size = m.sizes[groups[:, 0]]
    out_start = offsets(size)
    term_size = m.sizes[m.term_var[term]]
    entry = runs(m.term_start[term], term_size)
    added = scatter_add(runs(out_start[slot], term_size), usage[entry], out_start[-1])
    return replace(
        m,
        term_var=groups[:, 0],
        term_rows=groups[:, 1:],
        term_start=out_start,
        term_usage=added,
        room=room[kept],
        moment=m.moment[kept],
    )


def composed(outer: Lift, inner: Lift) -> Lift:
    """First ``inner``, then ``outer``."""
    return lambda x: outer(inner(x))
