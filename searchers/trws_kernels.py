"""The compiled inner loop of TRW-S (see ``trws``); imported only when it is needed."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import numpy as np

from autopar.searchers.memory_kernels import jit, most_labels


@jit
def least_sent(cells, total, share, came, sent):
    """What a variable tells another one: for each label of that the least of its own, of which a
    ``share`` of its total counts without what ``came`` from there. Returns the least of all."""
    width = len(sent)
    at = 0
    for i in range(len(total)):
        mine = share * total[i] - came[i]
        row = cells[at : at + width]
        at += width
        if i == 0:
            for j in range(width):
                sent[j] = mine + row[j]
        else:
            for j in range(width):
                sent[j] = min(sent[j], mine + row[j])
    least = sent[0]
    for j in range(1, width):
        least = min(least, sent[j])
    return least


@jit
def sweep(arcs, unary, message, backwards, reduced, choice):
    """One pass over the variables in order, or backwards; updates everything on its last line.

    Returns the bound of the pass.  ``reduced`` becomes the reduced cost of every label (least zero
    for each variable), ``choice`` a labelling decoded one variable after the other.
    """
    start, out, out_start, head, cell_start, cells, message_start = arcs
    n = len(start) - 1
    score = np.empty(most_labels(start))
    line = np.empty(len(score))
    bound = 0.0
    for step in range(n):
        v = n - 1 - step if backwards else step
        lo = start[v]
        size = start[v + 1] - lo
        total = reduced[lo : lo + size]
        for i in range(size):
            total[i] = unary[lo + i]
            score[i] = unary[lo + i]
        later = 0
        for s in range(out_start[v], out_start[v + 1]):
            back = out[s] ^ 1
            w = head[out[s]]
            came = message[message_start[back] : message_start[back] + size]
            for i in range(size):
                total[i] += came[i]
            if (w > v) != backwards:
                later += 1
                for i in range(size):
                    score[i] += came[i]
            else:
                at = cell_start[back] + choice[w] * size
                for i in range(size):
                    score[i] += cells[at + i]
        best = 0
        least = total[0]
        for i in range(1, size):
            least = min(least, total[i])
            if score[i] < score[best]:
                best = i
        choice[v] = best
        bound += least
        for i in range(size):
            total[i] -= least
        share = 1.0 / max(later, out_start[v + 1] - out_start[v] - later, 1)
        for s in range(out_start[v], out_start[v + 1]):
            arc = out[s]
            w = head[arc]
            if (w > v) == backwards:
                continue
            width = start[w + 1] - start[w]
            came = message[message_start[arc ^ 1] : message_start[arc ^ 1] + size]
            sent = line[:width]
            least = least_sent(cells[cell_start[arc] :], total, share, came, sent)
            bound += least
            to = message[message_start[arc] : message_start[arc] + width]
            for j in range(width):
                to[j] = sent[j] - least
    return bound
