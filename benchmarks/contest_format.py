"""The JSON format of the ASPLOS 2025 contest on intra-operator parallelism, read and written.

{"problem": {"name": ..., "nodes": {"intervals": [[lo, hi], ...], "costs": [[...], ...],
 "usages": [[...], ...]}, "edges": {"nodes": [[a, b], ...], "costs": [[...], ...]},
 "usage_limit": ...}}
"""

from __future__ import annotations

import gzip
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from autopar.nouns.problem import (
    NO_LIMIT,
    Ints,
    MissingNode,
    NoStrategies,
    NotAProblem,
    NumberTooLarge,
    Problem,
    ProblemError,
    WrongMatrixSize,
    offsets,
)


def load(path: str | Path) -> Problem:
    """Read a file, gzipped or not.  Raises a ProblemError that names the file and what is wrong."""
    path = Path(path)
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
            raise NotAProblem(f"{path}: the gzip stream is broken ({error})") from None
    try:
        return loads(data, default_name=path.name.split(".")[0])
    except ProblemError as error:
        raise type(error)(f"{path}: {error}") from None


def loads(data: bytes | str, default_name: str = "") -> Problem:
    """Parse the contest's JSON."""
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise NotAProblem(f"not JSON, or cut short: {error}") from None
    body = _member(document, "problem", dict, "")
    nodes = _member(body, "nodes", dict, "problem.")
    edges = _member(body, "edges", dict, "problem.")
    intervals = _pairs(_member(nodes, "intervals", list, "nodes."), "nodes.intervals")
    cost_sizes, cost = _rows(nodes.pop("costs", None), "nodes.costs")
    usage_sizes, usage = _rows(nodes.pop("usages", None), "nodes.usages")
    if len(cost_sizes) != len(intervals) or len(usage_sizes) != len(intervals):
        raise NoStrategies(
            f"{len(intervals)} intervals, {len(cost_sizes)} lists of costs, "
            f"{len(usage_sizes)} lists of usages: there must be one of each for every node"
        )
    if len(unequal := np.flatnonzero(cost_sizes != usage_sizes)):
        i = unequal[0]
        raise NoStrategies(f"node {i} has {cost_sizes[i]} costs but {usage_sizes[i]} usages")
    pairs = _pairs(_member(edges, "nodes", list, "edges."), "edges.nodes", MissingNode)
    cell_sizes, cells = _rows(edges.pop("costs", None), "edges.costs")
    if len(cell_sizes) != len(pairs):
        raise WrongMatrixSize(f"{len(pairs)} edges but {len(cell_sizes)} matrices")
    limit = body.get("usage_limit", NO_LIMIT)
    if type(limit) is not int:
        raise NumberTooLarge(f"usage_limit must be an integer of 64 bits, not {limit!r}")
    name = body.get("name", default_name)
    return Problem(
        strategy_start=offsets(cost_sizes),
        cost=cost,
        usage=usage,
        interval=intervals,
        edge=pairs,
        edge_start=offsets(cell_sizes),
        edge_cost=cells,
        usage_limit=limit,
        name=name if isinstance(name, str) else default_name,
    )


def dumps(problem: Problem) -> bytes:
    """The contest's JSON for a problem; reads back equal, but for labels and scale."""

    def split(values: Ints, start: Ints) -> list[list[int]]:
        flat, cut = values.tolist(), start.tolist()
        return [flat[lo:hi] for lo, hi in pairwise(cut)]

    return orjson.dumps(
        {
            "problem": {
                "name": problem.name,
                "nodes": {
                    "intervals": problem.interval.tolist(),
                    "costs": split(problem.cost, problem.strategy_start),
                    "usages": split(problem.usage, problem.strategy_start),
                },
                "edges": {
                    "nodes": problem.edge.tolist(),
                    "costs": split(problem.edge_cost, problem.edge_start),
                },
                "usage_limit": problem.usage_limit,
            }
        }
    )


def dump(problem: Problem, path: str | Path) -> None:
    """Write a problem for any solver of the contest's format; gzipped when the name ends in .gz."""
    path, data = Path(path), dumps(problem)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _member(record: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(record, dict):
        raise NotAProblem(f"expected an object with the key {key!r}, found {_short(record)}")
    if not isinstance(record.get(key), kind):
        value = _short(record[key]) if key in record else "nothing"
        raise NotAProblem(f"{where}{key} must be a JSON {kind.__name__}, found {value}")
    return record[key]


def _pairs(rows: list[Any], what: str, wrong: type[ProblemError] = NotAProblem) -> Ints:
    sizes, flat = _rows(rows, what)
    if len(odd := np.flatnonzero(sizes != 2)):
        raise wrong(f"{what}[{odd[0]}] must be two integers, found {_short(rows[odd[0]])}")
    return flat.reshape(-1, 2)


def _rows(rows: Any, what: str) -> tuple[Ints, Ints]:
    """Sizes and concatenation of a list of lists of integers."""
    if not isinstance(rows, list):
        raise NotAProblem(f"{what} must be a list of lists, found {_short(rows)}")
    if len(set(map(type, rows)) - {list}):
        i = next(i for i, row in enumerate(rows) if type(row) is not list)
        raise NotAProblem(f"{what}[{i}] must be a list, found {_short(rows[i])}")
    sizes = np.fromiter(map(len, rows), np.int64, len(rows))
    kinds = set(map(type, chain.from_iterable(rows)))
    if not kinds <= {int}:
        i, bad = next((i, v) for i, row in enumerate(rows) for v in row if type(v) is not int)
        raise NumberTooLarge(f"{what}[{i}] holds {_short(bad)}, not an integer of 64 bits")
    try:
        flat = np.fromiter(chain.from_iterable(rows), np.int64, int(sizes.sum()))
    except OverflowError:
        i, bad = next((i, v) for i, row in enumerate(rows) for v in row if v >= 2**63)
        raise NumberTooLarge(f"{what}[{i}] holds {bad}, not an integer of 64 bits") from None
    return sizes, flat


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
