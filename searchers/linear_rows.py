"""The integer program of a model as a MathOpt protocol buffer, built column by column.

Building through the buffer takes tenths of a second where adding variables one by one takes
minutes.  Columns are first the labels x (binary), then for every edge its shared cells y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.nouns.problem import Ints
from autopar.searchers.model import Floats, Model, runs


def program(m: Model, rows: Ints, scale: float, tick: Callable[[], None] = lambda: None) -> Any:
    """A ``ModelProto`` with the memory rows given; costs are divided by ``scale``.

    ``tick`` is called for every edge.
    """
    from ortools.math_opt import model_pb2

    unary = m.unary.copy()
    row_ids: list[Ints] = [np.repeat(np.arange(m.num_vars), m.sizes)]
    column_ids: list[Ints] = [np.arange(m.start[-1])]
    coefficients: list[Floats] = [np.ones(m.start[-1])]
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
            row_ids += [next_row + line[finite], next_row + group]
            column_ids += [column[finite], label]
            coefficients += [np.ones(int(finite.sum())), -np.ones(len(label))]
            next_row += height if label is first else width
        costs.append(cells.ravel()[finite])
        next_column += int(finite.sum())
    links = next_row
    of_memory, upper = _memory_rows(m, rows, next_row)
    next_row += len(upper)
    row_ids += of_memory.rows
    column_ids += of_memory.columns
    coefficients += of_memory.values

    proto = model_pb2.ModelProto()
    labels = int(m.start[-1])
    blocked = np.isinf(unary)
    variables = proto.variables
    variables.ids.extend(range(next_column))
    variables.lower_bounds.extend([0.0] * next_column)
    variables.upper_bounds.extend(np.where(blocked, 0.0, 1.0).tolist())
    variables.upper_bounds.extend([1.0] * (next_column - labels))
    variables.integers.extend([True] * labels + [False] * (next_column - labels))
    # A row equals 1 for a choice, 0 for a link; memory rows have an upper bound only.
    bounds = [1.0] * m.num_vars + [0.0] * (links - m.num_vars)
    proto.linear_constraints.ids.extend(range(next_row))
    proto.linear_constraints.lower_bounds.extend(bounds + [-np.inf] * len(upper))
    proto.linear_constraints.upper_bounds.extend(bounds + upper)
    row, column, value = _added_up(
        np.concatenate(row_ids), np.concatenate(column_ids), np.concatenate(coefficients)
    )
    proto.linear_constraint_matrix.row_ids.extend(row.tolist())
    proto.linear_constraint_matrix.column_ids.extend(column.tolist())
    proto.linear_constraint_matrix.coefficients.extend(value.tolist())
    cost = np.concatenate([np.where(blocked, 0.0, unary), *costs]) / scale
    priced = np.flatnonzero(cost)
    proto.objective.offset = m.constant / scale
    proto.objective.linear_coefficients.ids.extend(priced.tolist())
    proto.objective.linear_coefficients.values.extend(cost[priced].tolist())
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


def _added_up(row: Ints, column: Ints, value: Floats) -> tuple[Ints, Ints, Floats]:
    """Entries of a sparse matrix in order of rows, then columns; those of one place are one, and
    none is zero."""
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
class _Entries:
    """Of a sparse matrix, in parts: rows, columns and values, which have one length in each."""

    rows: list[Ints]
    columns: list[Ints]
    values: list[Floats]


def _memory_rows(m: Model, rows: Ints, first: int) -> tuple[_Entries, list[float]]:
    """The memory ``rows`` as rows of the program, from number ``first`` on, and what each is to
    stay below; of each the largest usage is 1, if that is more than a byte."""
    entries, upper = _Entries([], [], []), []
    for number, r in enumerate(rows.tolist(), first):
        term = np.flatnonzero((m.term_rows[:, 0] <= r) & (r < m.term_rows[:, 1]))
        size = m.sizes[m.term_var[term]]
        entry = runs(m.term_start[term], size)
        unit = max(float(m.term_usage[entry].max(initial=0.0)), 1.0)
        entries.rows.append(np.full(len(entry), number))
        entries.columns.append(runs(m.start[m.term_var[term]], size))
        entries.values.append(m.term_usage[entry] / unit)
        upper.append(float(m.room[r]) / unit)
    return entries, upper
