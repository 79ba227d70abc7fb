"""Which rows go to which rank's experts, and how they travel there and back.

Along an axis that splits experts a rank has a contiguous piece of them, first axis of the mesh
first. Two ways are known to bring tokens and experts together:

gathered  ("held")      tokens are whole on all ranks of the axis: each takes the routes to its own
                        experts, and what the ranks make adds up to the whole. Nothing moves here.
dispatched ("dispatch") every rank has tokens of its own: rows go to their experts' ranks by an
                        uneven all-to-all, results come back by its inverse, gradients likewise.

Tokens may travel in pieces, each with routes of its own: what stands between `Routes.set_out` and
`Routes.arrive`, and between `set_back` and `come_home`, hides the hop that starts there (PipeMoE,
Shi et al. 2023, section III; ScheMoE, Shi et al. 2024, section 3).

Over several axes rows hop along one after the other, the innermost first: to the peer that has the
experts' place along it, then across. The numbers of rows go ahead of them, of all
pieces at once and along all axes before the host waits, once a call, to cut what it sends.

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
from torch import Tensor, nn

from autopar.runtime.pytorch import ranks, transport
from autopar.runtime.pytorch.routed_rows import note
from autopar.runtime.pytorch.travelling import (
    Exchange,
    Travelling,
    begin_rows,
    exchange_rows,
    wait_rows,
)
from autopar.runtime.shared.settings import ProgramError

Axes = str | Sequence[str]
Going = Tensor | Travelling
"""Rows on a hop; where none is made, here."""


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """One exchange of rows, which lie by the rank that they go to.

    order: those that have come, in the order in which they go on: by the rank of the next hop, or
           by expert.
    """

    exchange: Exchange
    order: Tensor


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

    def set_out(self, h: Tensor) -> Going:
        """[s, d], a row for each chosen route, on the first hop."""
        return begin_rows(h, self.hops[0].exchange) if self.hops else h

    def arrive(self, going: Going) -> Tensor:
        """What set out -> [r, d] in the order of own experts."""
        h = going if isinstance(going, Tensor) else wait_rows(going)
        for i, hop in enumerate(self.hops):
            came = exchange_rows(h, hop.exchange) if i else h
            h = came.index_select(0, hop.order)
        return h

    def set_back(self, h: Tensor) -> Going:
        """The way back: [r, d] on its last hop."""
        for hop in self.hops[:0:-1]:
            h = exchange_rows(h.index_select(0, inverse(hop.order)), hop.exchange.back)
        if not self.hops:
            return h
        return begin_rows(
            h.index_select(0, inverse(self.hops[0].order)), self.hops[0].exchange.back
        )

    def come_home(self, going: Going) -> Tensor:
        """What was set back -> [s, d]."""
        return going if isinstance(going, Tensor) else wait_rows(going)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes ``order``."""
    places = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def routes_of_each(
    pieces: Sequence[Tensor],
    own: int,
    held: Axes = (),
    dispatch: Axes = (),
    layer: nn.Module | None = None,
) -> tuple[Routes, ...]:
    """Of pieces of the tokens, as many on every rank, each [n, k] of whole numbers of experts,
    where this rank has ``own`` of them. Their numbers of rows go ahead together.

    ``layer``: whose rows they are, for a run that counts. Every rank along ``dispatch`` must ask,
    also one without tokens. Raises `ProgramError` where an axis is named twice.
    """
    over, across = _in_mesh(held), _in_mesh(dispatch)
    if set(over) & set(across):
        raise ProgramError(
            f"experts: held={held!r} and dispatch={dispatch!r} name one axis; along it tokens are "
            "either whole on all ranks (held) or each rank's own (dispatch)"
        )
    hops = across[::-1]
    starting = [_leaving(index, own, over, hops) for index in pieces]
    leave, come = _ahead(torch.stack([leaving for _, leaving in starting]), hops)
    shares = [-(-index.numel() // math.prod(map(transport.size, over))) for index in pieces]
    sizes = []  # for each piece: how many start here, then of every hop those sent and received
    for i, (share, (_, leaving)) in enumerate(zip(shares, starting, strict=True)):
        sides = [side[i].sum(1) for pair in zip(leave, come, strict=True) for side in pair]
        if over or sides:
            sizes += [(leaving.sum().unsqueeze(0), share), *((side, share) for side in sides)]
    counts = on_host(sizes) if sizes else []
    each = len(counts) // len(pieces)
    made = []
    for i, (chosen, leaving) in enumerate(starting):
        number, *rows = counts[i * each : (i + 1) * each] or [[]]
        of_hops = zip(hops, rows[::2], rows[1::2], come, strict=True)
        made.append(
            Routes(
                chosen[: number[0]] if over else chosen,
                tuple(
                    Hop(
                        Exchange(tuple(sent), tuple(came), axis, shares[i]),
                        _by_key(there[i], sum(came)),
                    )
                    for axis, sent, came, there in of_hops
                ),
                come[-1][i].sum(0) if come else leaving,
                shares[i],
                not over,
            )
        )
    note(torch.stack([routes.rows for routes in made]).sum(0), _in_mesh((*over, *across)), layer)
    return tuple(made)


def _leaving(
    index: Tensor, own: int, over: Sequence[str], hops: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Routes in the order of leaving, and [keys] how many leave by key (`_keys`)."""
    keys, count = index.reshape(-1), own
    if over or hops:
        keys, count = _keys(keys, own, over, hops)
    # Routes that start elsewhere have a place of their own, those to no expert none: an error.
    leaving = keys.new_zeros(count + bool(over))
    leaving = leaving.scatter_add(0, keys, torch.ones_like(keys))[:count]
    return keys.argsort(stable=True), leaving


def _ahead(leaving: Tensor, axes: Sequence[str]) -> tuple[list[Tensor], list[Tensor]]:
    """For each hop [pieces, ranks, keys], rows by where they go, and by where they come from.

    ``leaving`` [pieces, keys]: rows by key. Behind a hop the keys are those left for the next.
    """
    leave, come = [], []
    for axis in axes:
        leave.append(leaving.view(len(leaving), transport.size(axis), -1))
        came = transport.all_to_all(leave[-1].transpose(0, 1), axis)
        come.append(came.transpose(0, 1))
        leaving = come[-1].sum(1)
    return leave, come


def on_host(sizes: Sequence[tuple[Tensor, int]]) -> list[list[int]]:
    """The values of sizes, for which the host waits once. Without values, as if each were the rows
    beside it spread evenly."""
    if sizes[0][0].is_meta:
        return [evenly(rows, len(size)) for size, rows in sizes]
    values = torch.cat([size for size, _ in sizes]).tolist()
    ends = list(itertools.accumulate(len(size) for size, _ in sizes))
    return [values[end - len(size) : end] for end, (size, _) in zip(ends, sizes, strict=True)]


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
