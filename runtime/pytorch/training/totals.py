"""Sums over the ranks of a step's own numbers: its loss, and what its means divide by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.pytorch.pipeline.stages import Stages
from autopar.runtime.pytorch.portions import weight_of
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.sequence_slices import Sequences, at, sliced
from autopar.runtime.pytorch.storage import Storage

Counts = Callable[[Mapping[str, Any]], Mapping[str, torch.Tensor]]
"""``counts`` of a program: what is summed over the global batch, of a part of it."""


@dataclass(frozen=True, slots=True)
class Total:
    """A sum on its way."""

    value: torch.Tensor
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.value


def all_reduce_async(value: torch.Tensor, ranks: Ranks, *axes: str) -> Total:
    """Starts to sum ``value`` over ``axes``, without gradient and in at least float32."""
    dtype = value.dtype
    if dtype.is_floating_point:
        dtype = torch.promote_types(dtype, torch.float32)
    total = value.detach().to(dtype, copy=True)
    group = ranks.group(*axes)
    return Total(
        total, None if group is None else dist.all_reduce(total, group=group, async_op=True)
    )


class LateCounts(Mapping[str, torch.Tensor]):
    """Sums by name; who reads one waits for them, and forward passes read them last."""

    def __init__(self, names: Sequence[str], total: Total) -> None:
        self._sums = dict(zip(names, total.value.unbind(), strict=True))
        self._total = total

    def __getitem__(self, name: str) -> torch.Tensor:
        self._total.wait()
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)


def total_counts(
    state: Storage | Stages, microbatches: Sequence[Mapping[str, Any]]
) -> dict[str, Mapping[str, torch.Tensor]]:
    """``{"counts": ...}`` of the whole batch where the program divides by them: one all-reduce over
    the data axes, meanwhile, of what its ``counts`` finds in this rank's microbatches."""
    asking: list[Any] = [state.model]
    if isinstance(state, Stages):
        asking = list(state.model.children())
    asks: list[Counts] = [
        m.counts for m in asking if "counts" in vars(m) or hasattr(type(m), "counts")
    ]
    if not asks:
        return {}
    with torch.no_grad():
        each = []
        for part in microbatches:
            with at(Sequences(), sliced(part), state.settings.seq_slices):
                counted = (ask(part).items() for ask in asks)
                each.append({n: c * bool(weight_of(part)) for some in counted for n, c in some})
        names = list(each[0])
        here = [torch.stack([counts[n].to(torch.int64) for counts in each]).sum() for n in names]
        total = all_reduce_async(torch.stack(here), state.ranks, *state.ranks.batch_axes)
        counts = LateCounts(names, total)
    # What is compiled is not to be cut where it waits.
    return {"counts": dict(counts) if state.style != "eager" else counts}
