"""The compiled inner loops of block annealing (see ``annealing``); imported only when needed."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.searchers.memory_kernels import change_label, jit

FAN = 24
"""Neighbours of one variable that a ball takes in."""


class Forest(NamedTuple):
    """Room for an induced forest; ``group`` to ``stamp`` by variable, the rest by place."""

    group: npt.NDArray[np.int64]
    inside: npt.NDArray[np.int64]
    stamp: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    parent: npt.NDArray[np.int64]
    tree_of: npt.NDArray[np.int64]


@jit
def uniform(state):
    """xorshift64* (Vigna 2016): the next number in [0, 1)."""
    s = state[0]
    s ^= s >> np.uint64(12)
    s ^= s << np.uint64(25)
    s ^= s >> np.uint64(27)
    state[0] = s
    return ((s * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@jit
def pick_ball(arcs, mark, move, reached, limit, stars, state):
    """Variables around a random one, breadth first, at most ``FAN`` neighbours of each.

    A share ``stars`` of the balls are stars: around the end of a random edge, so hubs are likely,
    with all its neighbours, for a hub moves only together with them.  Half of the other balls are
    put into random order, so that hubs do not always come first.
    """
    out, out_start, head = arcs.out, arcs.out_start, arcs.head
    star = uniform(state) < stars
    if star and len(head):
        v = head[np.int64(uniform(state) * len(head))]
        limit = min(max(limit, out_start[v + 1] - out_start[v] + 1), len(reached))
    else:
        v = np.int64(uniform(state) * (len(out_start) - 1))
    count = 1
    reached[0] = v
    mark[v] = move
    at = 0
    while at < count and count < limit:
        v = reached[at]
        degree = out_start[v + 1] - out_start[v]
        shift = np.int64(uniform(state) * degree)
        for k in range(degree if star and at == 0 else min(degree, FAN)):
            w = head[out[out_start[v] + (shift + k) % degree]]
            if mark[w] != move and count < limit:
                mark[w] = move
                reached[count] = w
                count += 1
        at += 1
    if not star and uniform(state) < 0.5:
        for i in range(count - 1, 0, -1):
            j = np.int64(uniform(state) * (i + 1))
            reached[i], reached[j] = reached[j], reached[i]
    return count


@jit
def find(group, v):
    """The root of v's tree (union-find with path halving)."""
    while group[v] != v:
        group[v] = group[group[v]]
        v = group[v]
    return v


@jit
def induced_forest(arcs, reached, count, move, forest):
    """Of the variables reached, in order, those that close no cycle; roots before their subtrees.

    Afterwards ``inside[v] == 2 * move + 1`` for the variables of the forest.  Returns their number.
    """
    out, out_start, head = arcs.out, arcs.out_start, arcs.head
    group, inside, stamp, order, parent, tree_of = forest
    chosen = 0
    for i in range(count):
        v = reached[i]
        fits = True
        token = (move + 1) * len(reached) + i
        for s in range(out_start[v], out_start[v + 1]):
            w = head[out[s]]
            if inside[w] == 2 * move:
                root = find(group, w)
                if stamp[root] == token:
                    fits = False
                    break
                stamp[root] = token
        if fits:
            group[v] = v
            for s in range(out_start[v], out_start[v + 1]):
                w = head[out[s]]
                if inside[w] == 2 * move:
                    group[find(group, w)] = v
            inside[v] = 2 * move
            reached[chosen] = v
            chosen += 1
    placed = 0
    trees = 0
    for i in range(chosen):
        if inside[reached[i]] != 2 * move:
            continue
        at = placed
        order[placed] = reached[i]
        parent[placed] = -1
        inside[reached[i]] = 2 * move + 1
        placed += 1
        while at < placed:
            v = order[at]
            tree_of[at] = trees
            at += 1
            for s in range(out_start[v], out_start[v + 1]):
                w = head[out[s]]
                if inside[w] == 2 * move:
                    inside[w] = 2 * move + 1
                    order[placed] = w
                    parent[placed] = out[s]
                    placed += 1
        trees += 1
    return placed


@jit
def solve_forest(arcs, guide, x, placed, move, forest, new, scratch, gumbel, heat, state):
    """The best labels ``new`` of a forest, its surroundings frozen at x, unaries perturbed.

    With Gumbel noise of scale ``heat`` on the unaries the minimiser is nearly a sample from the
    Gibbs distribution at that temperature (perturb-and-MAP, Papandreou & Yuille 2011).
    """
    start, out, out_start, head, cell_start, cells = arcs[:6]
    inside, order, parent = forest.inside, forest.order, forest.parent
    total, line = scratch
    many = len(gumbel) - len(line)
    for i in range(placed):
        v = order[i]
        lo = start[v]
        size = start[v + 1] - lo
        noise = np.int64(uniform(state) * many)
        for k in range(size):
            total[lo + k] = guide[lo + k] - heat * gumbel[noise + k]
        for s in range(out_start[v], out_start[v + 1]):
            w = head[out[s]]
            if inside[w] != 2 * move + 1:
                at = cell_start[out[s] ^ 1] + x[w] * size
                for k in range(size):
                    total[lo + k] += cells[at + k]
    for i in range(placed - 1, -1, -1):
        if parent[i] < 0:
            continue
        v = order[i]
        up = parent[i] ^ 1
        w = head[up]
        width = start[w + 1] - start[w]
        at = cell_start[up]
        for j in range(width):
            line[j] = 1e300
        for k in range(start[v], start[v + 1]):
            mine = total[k]
            for j in range(width):
                line[j] = min(line[j], mine + cells[at + j])
            at += width
        lo = start[w]
        for j in range(width):
            total[lo + j] += line[j]
    for i in range(placed):
        v = order[i]
        lo = start[v]
        size = start[v + 1] - lo
        if parent[i] >= 0:
            at = cell_start[parent[i]] + new[head[parent[i] ^ 1]] * size
            for k in range(size):
                total[lo + k] += cells[at + k]
        pick = 0
        for k in range(1, size):
            if total[lo + k] < total[lo + pick]:
                pick = k
        new[v] = pick


@jit
def exchange(arcs, unary, memory, order, first, last, new):
    """Swap x and new on order[first:last]; returns the change of cost.  Twice is nothing."""
    x = memory.choice
    delta = 0.0
    for i in range(first, last):
        v = order[i]
        pick = new[v]
        new[v] = x[v]
        if pick != x[v]:
            delta += change_label(arcs, unary, memory, v, pick)
    return delta


@jit
def anneal(
    arcs, unary, guide, memory, best, cost, best_cost, gumbel, hot, cold, moves, ball, state
):  # fmt: skip
    """Block moves with a temperature falling geometrically from ``hot`` to ``cold``.

    ``guide`` are the unary costs that proposals see (with prices on memory); ``cost`` is the true
    cost of ``x``.  A proposal is taken whole if it fits into memory, else tree by tree what fits.
    Returns the last cost, the best, the number of variables looked at, and how many moves memory
    blocked.
    """
    start, out_start = arcs.start, arcs.out_start
    x, tree = memory.choice, memory.tree
    n = len(start) - 1
    widest = 0
    for v in range(n):
        widest = max(widest, start[v + 1] - start[v])
    most = ball.most
    for v in range(n):
        most = max(most, out_start[v + 1] - out_start[v] + 1)
    forest = Forest(
        np.empty(n, np.int64),
        np.full(n, -1, np.int64),
        np.full(n, -1, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
    )
    order, tree_of = forest.order, forest.tree_of
    scratch = (np.empty(len(unary)), np.empty(widest))
    mark = np.full(n, -1, np.int64)
    new = np.empty(n, np.int64)
    reached = np.empty(most, np.int64)
    looked = 0
    blocked = 0
    for move in range(moves):
        heat = hot * (cold / hot) ** (move / moves)
        limit = 1 + np.int64((ball.most - 1) * uniform(state) ** ball.skew)
        count = pick_ball(arcs, mark, move, reached, limit, ball.stars, state)
        looked += count
        placed = induced_forest(arcs, reached, count, move, forest)
        solve_forest(arcs, guide, x, placed, move, forest, new, scratch, gumbel, heat, state)
        delta = exchange(arcs, unary, memory, order, 0, placed, new)
        if tree[1] > 0.0:
            blocked += 1
            delta += exchange(arcs, unary, memory, order, 0, placed, new)
            first = 0
            while first < placed:
                last = first
                while last < placed and tree_of[last] == tree_of[first]:
                    last += 1
                part = exchange(arcs, unary, memory, order, first, last, new)
                if tree[1] > 0.0:
                    part += exchange(arcs, unary, memory, order, first, last, new)
                delta += part
                first = last
        cost += delta
        if cost < best_cost - 1e-9 * abs(best_cost):
            best_cost = cost
            best[:] = x
    return cost, best_cost, looked, blocked
