"""Counting the collectives that a step really issues, hidden ones included.

A dispatch mode sees every call of torch's two collective namespaces: the program's own functional
collectives, forward and backward, DDP's reducer, FSDP2's gathers, our own reductions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from autopar.lowering.collectives import Row
from autopar.nouns.axes import PIPELINE
from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.ranks import Ranks
from autopar.torch_private.distributed import resolve_group
from autopar.torch_private.modes import TorchDispatchMode
from autopar.torch_private.ops import schema_of
from autopar.torch_private.tensors import tree_map_only

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


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``with Counting(ranks) as counted: ...``, then ``counted.rows()``."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks = ranks
        self._counts: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not _aside:
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def rows(self) -> list[Row]:
        """What was issued since the start, sorted."""
        here = self._ranks.index(PIPELINE) if self._ranks.size(PIPELINE) > 1 else 0
        return [Row(*what, count, rank=here) for what, count in sorted(self._counts.items())]

    def _note(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        name = str(schema_of(func).name)
        if name in _IGNORED:
            return
        if name not in _OPS:
            raise NotImplementedError(f"a collective that is not counted: {name}")
        kind, side = _OPS[name]
        group = _group(func, args, kwargs)
        size = transport.counted_bytes()
        if size is None:
            kind = "shift" if kind == "all_to_all" and _to_one_alone(func, args) else kind
            size = _bytes(args[int(side[0])]) * (group.size() if side.endswith("xN") else 1)
        self._counts[kind, self._ranks.axes_of(group), size] += 1


def _to_one_alone(func: Any, args: Any) -> bool:
    """Whether a functional all_to_all sends to one rank at most, as `transport.begin_shift`."""
    names = [argument.name for argument in schema_of(func).arguments]
    if "input_split_sizes" not in names or func.namespace != "_c10d_functional":
        return False
    sizes = args[names.index("input_split_sizes")]
    return len(sizes) > 1 and sum(size != 0 for size in sizes) <= 1


def _group(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dist.ProcessGroup:
    for i, argument in enumerate(schema_of(func).arguments):
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
