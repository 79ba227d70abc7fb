"""What it costs to bring a tensor from any of many shardings to any of many others.

Every price is that of the steps which `reshard` takes. A few pairs are priced one by one; many at
once from the table of all paths (`autopar.rules.paths`): the prices of all single steps of the
tensor, added up along every path.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from autopar.nouns.graph import DTYPE_BYTES, Tensor
from autopar.nouns.problem import FORBIDDEN
from autopar.planner.problem.codes import (
    DEFERRED_DIGIT,
    SPLIT_DIGIT,
    WHOLE_DIGIT,
    Codes,
    Ints,
    digit,
)
from autopar.planner.problem.piece_prices import Neighbours, saved_by_pieces
from autopar.pricing.prices import Prices
from autopar.rules.paths import Paths, Terrain, paths
from autopar.rules.reshard import reshard
from autopar.rules.resharding import COLLECTIVES, Collective, full_side, transition

FEW = 100
"""Pairs of shardings up to which each is priced by itself where one model axis moves."""
FEW_WAYS = 8
"""The same where several do: only pairs that differ on more than one axis need a search."""


@dataclass(slots=True)
class MovePrices:
    """Prices in picoseconds, both ways; FORBIDDEN where there is no way."""

    codes: Codes
    prices: Prices
    _pairs: dict[tuple[object, ...], dict[tuple[int, int], int]] = field(default_factory=dict)
    _tables: dict[tuple[object, ...], Ints] = field(default_factory=dict)
    _steps: dict[tuple[object, ...], Ints] = field(default_factory=dict)

    def between(
        self,
        tensor: Tensor,
        sources: Ints,
        targets: Ints,
        grad: bool,
        handed: bool = False,
        layers: Neighbours | None = None,
    ) -> Ints:
        """The price of every pair, shape (sources, targets); ``handed``: see `Prices.move`.
        ``layers``: beside which it may be moved in pieces."""
        rows, row_of = self.codes.distinct(sources)
        columns, column_of = self.codes.distinct(targets)
        if self._few(rows, columns):
            small = self._one_by_one(tensor, rows, columns, grad, handed)
        else:
            place = (tensor.shape, tensor.dtype, grad, handed, rows.tobytes(), columns.tobytes())
            known = self._tables.get(place)
            if known is None:
                known = self._tables[place] = self._all_at_once(tensor, rows, columns, grad, handed)
            small = known
        if layers is not None:
            small = small - saved_by_pieces(self.codes, self.prices, tensor, rows, columns, layers)
        return small[row_of[:, None], column_of[None, :]]

    def _few(self, rows: Ints, columns: Ints) -> bool:
        if len(rows) * len(columns) > FEW or np.count_nonzero(~self.codes.batch) < 2:
            return len(rows) * len(columns) <= FEW
        differ = self.codes.digits(rows)[:, None] != self.codes.digits(columns)[None, :]
        return int(np.count_nonzero(differ.sum(axis=-1) > 1)) <= FEW_WAYS

    def _one_by_one(
        self, tensor: Tensor, rows: Ints, columns: Ints, grad: bool, handed: bool
    ) -> Ints:
        known = self._pairs.setdefault((tensor.shape, tensor.dtype, grad, handed), {})
        prices = []
        for pair in itertools.product(rows.tolist(), columns.tolist()):
            price = known.get(pair)
            if price is None:
                price = known[pair] = self._pair(tensor, *pair, grad, handed)
            prices.append(price)
        return np.array(prices, np.int64).reshape(len(rows), len(columns))

    def _pair(self, tensor: Tensor, source: int, target: int, grad: bool, handed: bool) -> int:
        ends = (self.codes.sharding(source), self.codes.sharding(target))
        steps = reshard(*ends, tensor.shape, self.codes.mesh, grad)
        if steps is None:
            return FORBIDDEN
        return sum(self.prices.steps(steps, tensor, grad, handed))

    def _all_at_once(
        self, tensor: Tensor, rows: Ints, columns: Ints, grad: bool, handed: bool
    ) -> Ints:
        starts, goals = self.codes.digits(rows), self.codes.digits(columns)
        if not grad:  # then D is R
            starts[starts == DEFERRED_DIGIT] = WHOLE_DIGIT
            goals[goals == DEFERRED_DIGIT] = WHOLE_DIGIT
        every = np.concatenate([starts, goals])
        # Axes outside the first one on which anything differs never move.
        varying = np.flatnonzero((every != every[0]).any(axis=0))
        if not len(varying):
            return np.zeros((len(rows), len(columns)), np.int64)
        first = int(varying[0])
        fixed = every[0, :first].tolist()
        cuts, pieces = self._outside(tensor.shape, fixed)
        sizes = self.codes.mesh.sizes[first:]
        used = every[:, first:]
        dims = frozenset((np.unique(used[used >= SPLIT_DIGIT]) - SPLIT_DIGIT).tolist())
        table = paths(Terrain.of(tensor.shape, sizes, cuts, dims, grad))
        place = (tensor.shape, tensor.dtype, grad, handed, first, tuple(fixed), table.placements)
        steps = self._steps.get(place)
        if steps is None:
            steps = self._step_prices(tensor, table, pieces, first, grad, handed)
            self._steps[place] = steps
        return _along(
            table, steps, _states(table, starts[:, first:]), _states(table, goals[:, first:])
        )

    def _outside(
        self, shape: tuple[int, ...], fixed: list[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """In how many pieces the fixed axes cut each dim, and the size of the largest."""
        cuts, pieces = [1] * len(shape), list(shape)
        for ways, number in zip(self.codes.mesh.sizes, fixed, strict=False):
            if number >= SPLIT_DIGIT:
                dim = number - SPLIT_DIGIT
                cuts[dim] *= ways
                pieces[dim] = -(-pieces[dim] // ways)
        return tuple(cuts), tuple(pieces)

    def _step_prices(
        self,
        tensor: Tensor,
        table: Paths,
        pieces: tuple[int, ...],
        first: int,
        grad: bool,
        handed: bool,
    ) -> Ints:
        """The price of every step of a table, and 0 for none; shape (steps + 1,)."""
        mesh = self.codes.mesh
        local = table.local_numel(pieces) * DTYPE_BYTES[tensor.dtype]
        sizes, size_of = np.unique(local, return_inverse=True)
        count = len(table.placements)
        prices = np.zeros((table.states, table.axes, count), np.int64)
        for i in range(table.axes):
            axis = mesh.axes[first + i]
            by_place = np.zeros((count, len(sizes), count), np.int64)
            for a, source in enumerate(table.placements):
                for b, target in enumerate(table.placements):
                    kinds = transition(source, target) or ()
                    for kind in kinds if grad else kinds[:1]:
                        if kind in COLLECTIVES:
                            full = full_side(kind, source, mesh.size(axis))
                            by_place[a, :, b] += [
                                self.prices.move(Collective(kind, axis, size * full), handed)
                                for size in sizes.tolist()
                            ]
            prices[:, i] = by_place[table.digits[:, i], size_of]
        return np.append(prices.ravel(), 0)


def _states(table: Paths, digits: Ints) -> Ints:
    """The states of a table that have these digits on its axes."""
    place = np.zeros(int(digits.max(initial=0)) + 1, np.int64)
    for k, known in enumerate(table.placements):
        if digit(known) < len(place):
            place[digit(known)] = k
    return np.asarray(place[digits] @ np.array(table.weights, np.int64))


def _along(table: Paths, steps: Ints, starts: Ints, goals: Ints) -> Ints:
    """The prices of ``steps`` added up on the way from every start to every goal."""
    total = np.zeros((len(starts), len(goals)), np.int64)
    lost = np.zeros(total.shape, bool)
    for hop in table.hops:
        taken = hop[starts[:, None], goals[None, :]]
        lost |= taken < 0
        total += steps[taken]
    total[lost] = FORBIDDEN
    return total
