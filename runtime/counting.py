"""Counting the collectives that a step really issues, hidden ones included.

A dispatch mode sees every call of torch's two collective namespaces: the program's own functional
collectives, forward and backward, DDP's reducer, FSDP2's gathers, our own reductions. The table is
the one of ``collectives.json``::

    {"format": 1, "rows": [{"kind": "all_gather", "axis": "dp_shard", "size_bytes": 4096,
                            "count": 6, "what": "model.layers.0 forward"}, ...]}

``size_bytes`` is the full-size side on rank 0, as in `autopar.rules.resharding.Collective`; a group
over several axes is written ``"dp_replicate+dp_shard"``, outermost first; ``what`` is for readers.
DDP and the reductions of gradients cut their work into buckets, so priced and issued tables are
compared by the bytes per kind and axis.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.ranks import Ranks
from autopar.runtime.torch_private import TorchDispatchMode, resolve_group, tree_map_only

FORMAT = 1

# op name -> (kind, which argument is the full-size side; "xN": that one times the group's size)
_OPS: Mapping[str, tuple[str, str]] = {
    "c10d::allreduce_": ("all_reduce", "0"),
    "c10d::allreduce_coalesced_": ("all_reduce", "0"),
    "c10d::_allgather_base_": ("all_gather", "0"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "0"),
    "c10d::allgather_": ("all_gather", "0"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "1"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "1"),
    "c10d::reduce_scatter_": ("reduce_scatter", "1"),
    "c10d::alltoall_base_": ("all_to_all", "1"),
    "c10d::alltoall_": ("all_to_all", "1"),
    "c10d::broadcast_": ("broadcast", "0"),
    "c10d::gather_": ("gather", "0"),
    "c10d::scatter_": ("scatter", "1"),
    "c10d::reduce_": ("reduce", "0"),
    "c10d::send": ("send", "0"),
    "c10d::recv_": ("recv", "0"),
    "_c10d_functional::all_reduce": ("all_reduce", "0"),
    "_c10d_functional::all_reduce_": ("all_reduce", "0"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "0"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "0"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "0xN"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "0xN"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "0"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "0"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "0"),
    "_c10d_functional::broadcast": ("broadcast", "0"),
    "_c10d_functional::broadcast_": ("broadcast", "0"),
}
_IGNORED = frozenset({"_c10d_functional::wait_tensor", "c10d::barrier", "c10d::monitored_barrier_"})


_aside: list[None] = []


@contextmanager
def not_counted() -> Iterator[None]:
    """What is issued inside watches over the job: it is no part of the program, whose collectives
    alone are priced and counted. Only for what moves a few bytes, whatever the model."""
    _aside.append(None)
    try:
        yield
    finally:
        _aside.pop()


@dataclass(frozen=True, slots=True)
class Row:
    """``count`` collectives of one size in a step."""

    kind: str
    axis: str
    size_bytes: int
    count: int
    what: str = ""


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``with Counting(ranks) as counted: ...``, then ``counted.rows()``."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks = ranks
        self._found: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not _aside:
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def rows(self) -> list[Row]:
        """What was issued since the start, sorted."""
        return [Row(*what, count) for what, count in sorted(self._found.items())]

    def _note(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        name = str(func._schema.name)
        if name in _IGNORED:
            return
        if name not in _OPS:
            raise NotImplementedError(f"a collective that is not counted: {name}")
        kind, side = _OPS[name]
        group = _group(func, args, kwargs)
        size = _bytes(args[int(side[0])]) * (group.size() if side.endswith("xN") else 1)
        self._found[kind, self._ranks.axes_of(group), size] += 1


def _group(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    for i, argument in enumerate(func._schema.arguments):
        if argument.name not in ("process_group", "group_name"):
            continue
        value = kwargs.get(argument.name, args[i] if i < len(args) else None)
        if isinstance(value, str):
            value = resolve_group(value)  # type: ignore[arg-type]
        if not isinstance(value, dist.ProcessGroup):
            value = dist.ProcessGroup.unbox(value)
        assert isinstance(value, dist.ProcessGroup)
        return value
    raise NotImplementedError(f"{func} names no process group")


def _bytes(tree: Any) -> int:
    sizes: list[int] = []
    tree_map_only(torch.Tensor, lambda t: sizes.append(t.numel() * t.element_size()), tree)
    return sum(sizes)


def to_json(rows: Iterable[Row]) -> str:
    """The text of ``collectives.json``."""
    return json.dumps({"format": FORMAT, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def from_json(text: str) -> list[Row]:
    """The inverse of `to_json`; raises ValueError for another format."""
    data = json.loads(text)
    if data.get("format") != FORMAT:
        raise ValueError(f"collectives.json has format {data.get('format')!r}, not {FORMAT}")
    return [Row(**row) for row in data["rows"]]


def totals(rows: Iterable[Row]) -> dict[tuple[str, str], int]:
    """Bytes by kind and axis; rows without bytes are left out."""
    found: Counter[tuple[str, str]] = Counter()
    for row in rows:
        found[row.kind, row.axis] += row.size_bytes * row.count
    return {where: size for where, size in sorted(found.items()) if size}


def differences(priced: Iterable[Row], issued: Iterable[Row]) -> list[str]:
    """One line for every kind and axis whose bytes differ; empty where the tables agree."""
    wanted, found = totals(priced), totals(issued)
    return [
        f"{kind} over {axis}: priced {wanted.get((kind, axis), 0)} bytes a step, "
        f"issued {found.get((kind, axis), 0)}"
        for kind, axis in sorted(wanted.keys() | found.keys())
        if wanted.get((kind, axis), 0) != found.get((kind, axis), 0)
    ]
