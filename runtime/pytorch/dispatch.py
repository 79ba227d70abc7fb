"""Which rows go to which rank's experts, and how they travel there and back.

Along an axis that splits experts a rank has a contiguous piece of them, first axis of the mesh
first. Two ways are known to bring tokens and experts together:

gathered  ("held")      tokens are whole on all ranks of the axis: each takes the routes to its own
                        experts, and what the ranks make adds up to the whole. Nothing moves here.
dispatched ("dispatch") every rank has tokens of its own: rows go to their experts' ranks by an
                        uneven all-to-all, results come back by its inverse, gradients likewise.

Over several axes rows hop along one after the other, the innermost first: to the peer that has the
experts' place along it, then across. The numbers of rows go ahead of them, along all axes before
the host waits, once a call, to cut what it sends.

What one rank issues along each axis, with n tokens of k routes, rows of d numbers, e experts:

    forward    all-to-all of e / (ranks held over, and hopped over already) counts, of 8 bytes
               all-to-all of rows out, all-to-all of rows back
    backward   all-to-all of gradients out, all-to-all of gradients back

Each of the four moves n k d numbers: exactly those of the own tokens on the way out, those that
came in on the way back. Over all ranks both add up to the same, so each is counted as n k d
(divided by the ranks that hold the same tokens, where experts are gathered along another axis).
What a rank sends to itself is of these, and crosses no link: 4 x d x rows to others' experts do.

Where routes have no values (a dry run) every rank sends as many rows to each as to any other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.pytorch import ranks, transport
from autopar.runtime.pytorch.collectives import exchange_rows
from autopar.runtime.pytorch.routed_rows import note
from autopar.runtime.shared.settings import ProgramError

Axes = str | Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """One exchange of rows, which lie by the rank that they go to.

    sent, received: rows to and from each rank along ``axis``.
    order:          those that have come, in the order in which they go on: by the rank of the next
                    hop, or by expert.
    counted:        rows that each exchange counts as, see the head of this file.
    """

    axis: str
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor
    counted: int


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """How the routes of this rank's tokens meet their experts.

    chosen: [s] places in the flattened [n, k] routes, those that start here, in order of leaving.
    hops:   from here to the experts.
    rows:   [own experts] how many each has in the end.
    share:  an even share of all, which what is done for rows counts as.
    whole:  whether all routes of this rank's tokens are among the chosen.
    """

    chosen: Tensor
    hops: tuple[Hop, ...]
    rows: Tensor
    share: int
    whole: bool

    def to_experts(self, h: Tensor) -> Tensor:
        """[s, d], a row for each chosen route -> [r, d] in the order of own experts."""
        for hop in self.hops:
            came = exchange_rows(h, hop.sent, hop.received, hop.axis, hop.counted)
            h = came.index_select(0, hop.order)
        return h

    def to_tokens(self, h: Tensor) -> Tensor:
        """The way back: [r, d] -> [s, d]."""
        for hop in reversed(self.hops):
            h = h.index_select(0, inverse(hop.order))
            h = exchange_rows(h, hop.received, hop.sent, hop.axis, hop.counted)
        return h


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes ``order``."""
    places = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def routes_of(index: Tensor, own: int, held: Axes = (), dispatch: Axes = ()) -> Routes:
    """Of ``index`` [n, k], whole numbers of experts, where this rank has ``own`` of them.

    Every rank along ``dispatch`` must ask, also one without tokens. Raises `ProgramError` where an
    axis is named twice.
    """
    over, across = _in_mesh(held), _in_mesh(dispatch)
    if set(over) & set(across):
        raise ProgramError(
            f"experts: held={held!r} and dispatch={dispatch!r} name one axis; along it tokens are "
            "either whole on all ranks (held) or each rank's own (dispatch)"
        )
    keys, count = index.reshape(-1), own
    if over or across:
        keys, count = _keys(keys, own, over, across[::-1])
    chosen = keys.argsort(stable=True)
    # Routes that start elsewhere have a place of their own, those to no expert none: an error.
    leaving = keys.new_zeros(count + bool(over))
    leaving = leaving.scatter_add(0, keys, torch.ones_like(keys))[:count]
    leave, come = _ahead(leaving, across[::-1])
    share = -(-len(keys) // math.prod(map(transport.size, over)))
    sums = [side.sum(1) for pair in zip(leave, come, strict=True) for side in pair]
    number, *sizes = on_host([leaving.sum().unsqueeze(0), *sums], share) if over or sums else [[]]
    hops = [
        Hop(axis, tuple(sent), tuple(received), _by_key(there, sum(received)), share)
        for axis, sent, received, there in zip(
            across[::-1], sizes[::2], sizes[1::2], come, strict=True
        )
    ]
    rows = come[-1].sum(0) if come else leaving
    note(rows, _in_mesh((*over, *across)))
    return Routes(chosen[: number[0]] if over else chosen, tuple(hops), rows, share, not over)


def _ahead(leaving: Tensor, axes: Sequence[str]) -> tuple[list[Tensor], list[Tensor]]:
    """For each hop [ranks, keys], rows by where they go, and by where they come from.

    ``leaving``: rows by key. Behind a hop the keys are those that are left for the next.
    """
    leave, come = [], []
    for axis in axes:
        leave.append(leaving.view(transport.size(axis), -1))
        come.append(transport.all_to_all(leave[-1], axis))
        leaving = come[-1].sum(0)
    return leave, come


def on_host(sizes: Sequence[Tensor], rows: int) -> list[list[int]]:
    """The values of ``sizes``, for which the host waits once. Without values, as if each were
    ``rows`` spread evenly."""
    if sizes[0].is_meta:
        return [evenly(rows, len(size)) for size in sizes]
    values = torch.cat(list(sizes)).tolist()
    ends = list(itertools.accumulate(map(len, sizes)))
    return [values[end - len(size) : end] for end, size in zip(ends, sizes, strict=True)]


def evenly(rows: int, ways: int) -> list[int]:
    """``rows`` in ``ways`` parts, of which the first have one more where it does not divide."""
    return [rows // ways + (i < rows % ways) for i in range(ways)]


def _in_mesh(axes: Axes) -> tuple[str, ...]:
    """Those of several ranks, outermost first."""
    named = (axes,) if isinstance(axes, str) else tuple(axes)
    if not named:
        return ()
    return tuple(a for a in ranks.current().mesh.axes if a in named and transport.size(a) > 1)


def _keys(flat: Tensor, own: int, over: Sequence[str], hops: Sequence[str]) -> tuple[Tensor, int]:
    """For each route its place in the order of sending, below the count that is returned too.

    The order is by the place along the first hop's axis, then along the next one's, then by expert.
    Routes to experts that other ranks along ``over`` have come behind all.
    """
    axes = _in_mesh((*over, *hops))
    each = [transport.size(axis) for axis in axes]
    mine = torch.arange(own * math.prod(each), device=flat.device).view(*each, own)
    keys = torch.empty_like(mine.reshape(-1))
    for axis in over:
        mine = mine.narrow(axes.index(axis), transport.index(axis), 1)
    mine = mine.permute(*map(axes.index, (*hops, *over)), len(axes)).reshape(-1)
    keys.fill_(len(mine))
    keys[mine] = torch.arange(len(mine), device=flat.device)
    return keys.index_select(0, flat), len(mine)


def _by_key(came: Tensor, rows: int) -> Tensor:
    """Rows come by rank, and of each by key: their order by key. ``came`` [ranks, keys] has their
    numbers, ``rows`` their sum."""
    ways, keys = came.shape
    key = torch.arange(keys, device=came.device).repeat(ways)
    return key.repeat_interleave(came.reshape(-1), output_size=rows).argsort(stable=True)
