"""The integer program of a model as arrays, and as a MathOpt protocol buffer.

Filling the buffer takes tenths of a second where adding variables one by one takes minutes.
Columns are first the labels x (binary), then for every edge its shared cells y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.nouns.problem import Ints
from autopar.searchers.model import Floats, Model, runs


@dataclass(frozen=True, slots=True)
class _Entries:
    """Of a sparse matrix, in the parts in which they were added."""

    rows: list[Ints] = field(default_factory=list)
    columns: list[Ints] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)

    def add(self, rows: Ints, columns: Ints, values: Floats | float) -> None:
        """One of each; ``values`` may be one number for all."""
        self.rows.append(rows)
        self.columns.append(columns)
        self.values.append(np.broadcast_to(values, rows.shape))

    def added_up(self) -> tuple[Ints, Ints, Floats]:
        """In order of rows, then columns; those of one place are one, and none is zero."""
        row, column = np.concatenate(self.rows), np.concatenate(self.columns)
        value = np.concatenate(self.values)
        order = np.lexsort((column, row))
        row, column, value = row[order], column[order], value[order]
        # Several terms of one variable may cover a row: entries of one place are added up.
        fresh = np.ones(len(row), bool)
        fresh[1:] = (row[1:] != row[:-1]) | (column[1:] != column[:-1])
        at = np.flatnonzero(fresh)
        value = np.add.reduceat(value, at)
        used = value != 0
        return row[at][used], column[at][used], value[used]


@dataclass(frozen=True, slots=True)
class Program:
    """The least ``cost`` of columns between 0 and ``upper``, of which the first ``labels`` are
    whole numbers, so that every row lies between its bounds. ``entries``: rows, columns and values
    of the matrix; ``offset``: of all costs."""

    labels: int
    cost: Floats
    offset: float
    upper: Floats
    row_lower: Floats
    row_upper: Floats
    entries: tuple[Ints, Ints, Floats]


def program(m: Model, rows: Ints, scale: float, tick: Callable[[], None] = lambda: None) -> Program:
    """With the memory rows given; costs are divided by ``scale``. ``tick`` is called for every
    edge."""
    unary = m.unary.copy()
    entries = _Entries()
    entries.add(np.repeat(np.arange(m.num_vars), m.sizes), np.arange(m.start[-1]), 1.0)
    costs: list[Floats] = []
    next_row, next_column = m.num_vars, int(m.start[-1])
    for e, (a, b) in enumerate(m.edge.tolist()):
        tick()
        cells, from_row, from_column, row_part, column_part = shared_cells(m.matrix(e))
        first, second = m.start[a] + np.arange(m.sizes[a]), m.start[b] + np.arange(m.sizes[b])
        unary[first] += row_part
        unary[second] += column_part
        height, width = cells.shape
        place = np.arange(height * width)
        finite = np.isfinite(cells.ravel())
        column = np.cumsum(finite) - 1 + next_column
        for line, label, group in (
            (place // width, first, from_row),
            (place % width, second, from_column),
        ):
            entries.add(next_row + line[finite], column[finite], 1.0)
            entries.add(next_row + group, label, -1.0)
            next_row += height if label is first else width
        costs.append(cells.ravel()[finite])
        next_column += int(finite.sum())
    links = next_row
    upper = _add_memory_rows(m, rows, next_row, entries)
    next_row += len(upper)

    labels = int(m.start[-1])
    blocked = np.isinf(unary)
    # A row equals 1 for a choice, 0 for a link; memory rows have an upper bound only.
    bounds = [1.0] * m.num_vars + [0.0] * (links - m.num_vars)
    return Program(
        labels,
        np.concatenate([np.where(blocked, 0.0, unary), *costs]) / scale,
        m.constant / scale,
        np.concatenate([np.where(blocked, 0.0, 1.0), np.ones(next_column - labels)]),
        np.array(bounds + [-np.inf] * len(upper)),
        np.array(bounds + upper),
        entries.added_up(),
    )


def message(made: Program) -> Any:
    """A ``ModelProto`` of it, filled column by column."""
    from ortools.math_opt import model_pb2

    columns, rows = len(made.cost), len(made.row_upper)
    proto = model_pb2.ModelProto()
    variables = proto.variables
    variables.ids.extend(range(columns))
    variables.lower_bounds.extend([0.0] * columns)
    variables.upper_bounds.extend(made.upper.tolist())
    variables.integers.extend([True] * made.labels + [False] * (columns - made.labels))
    proto.linear_constraints.ids.extend(range(rows))
    proto.linear_constraints.lower_bounds.extend(made.row_lower.tolist())
    proto.linear_constraints.upper_bounds.extend(made.row_upper.tolist())
    row, column, value = made.entries
    proto.linear_constraint_matrix.row_ids.extend(row.tolist())
    proto.linear_constraint_matrix.column_ids.extend(column.tolist())
    proto.linear_constraint_matrix.coefficients.extend(value.tolist())
    priced = np.flatnonzero(made.cost)
    proto.objective.offset = made.offset
    proto.objective.linear_coefficients.ids.extend(priced.tolist())
    proto.objective.linear_coefficients.values.extend(made.cost[priced].tolist())
    return proto


def shared_cells(matrix: Floats) -> tuple[Floats, Ints, Ints, Floats, Floats]:
    """Split a matrix into a part per row, a part per column, and the rest with repeats shared.

    matrix[i, j] = row_part[i] + column_part[j] + cells[from_row[i], from_column[j]]
    """
    row_part = matrix.min(axis=1)
    row_part[~np.isfinite(row_part)] = 0.0
    cells, from_row = np.unique(matrix - row_part[:, None], axis=0, return_inverse=True)
    column_part = cells.min(axis=0)
    column_part[~np.isfinite(column_part)] = 0.0
    columns, from_column = np.unique((cells - column_part).T, axis=0, return_inverse=True)
    return columns.T, from_row.ravel(), from_column.ravel(), row_part, column_part


def _add_memory_rows(m: Model, rows: Ints, first: int, entries: _Entries) -> list[float]:
    """Adds the memory ``rows`` as rows of the program, from number ``first`` on; what each is to
    stay below. Of each the largest usage is 1, if that is more than a byte."""
    upper = []
    for number, r in enumerate(rows.tolist(), first):
        term = np.flatnonzero((m.term_rows[:, 0] <= r) & (r < m.term_rows[:, 1]))
        size = m.sizes[m.term_var[term]]
        entry = runs(m.term_start[term], size)
        unit = max(float(m.term_usage[entry].max(initial=0.0)), 1.0)
        column = runs(m.start[m.term_var[term]], size)
        entries.add(np.full(len(entry), number), column, m.term_usage[entry] / unit)
        upper.append(float(m.room[r]) / unit)
    return upper
