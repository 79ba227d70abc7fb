"""How many rows went to each expert of a layer in a run, and how uneven that was.

A call of experts counts its rows anyway; while a run notes them, a reference to these counts is
kept on the device, and nothing waits. At the end ranks add up what they noted, once. Rows of all
ranks that compute a microbatch count together: what is asked is how a layer's routes spread, which
follows from weights and data, not from who held what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.nouns.axes import PIPELINE
from autopar.runtime.pytorch import ranks, transport
from autopar.runtime.pytorch.counting import not_counted
from autopar.runtime.pytorch.expert_places import Layer, layer_of
from autopar.runtime.pytorch.ranks import Ranks

MOST_CALLS = 20_000
"""The last ones are kept; a call keeps 8 bytes for each expert that the rank has."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """rows: [own experts] of this rank; ``axes`` split the layer's, outermost first; ``layer``
    holds their matrices, None where it is not known."""

    rows: Tensor
    axes: tuple[str, ...]
    layer: nn.Module | None = None


@dataclass(slots=True)
class RoutedRows:
    calls: deque[_Call] = field(default_factory=lambda: deque(maxlen=MOST_CALLS))

    def imbalance(self, job: Ranks) -> dict[str, Any]:
        """Rows of the busiest over the mean, of experts (``mean`` of all calls, ``worst`` one) and
        of the ``ranks`` that share a layer's (``rank_mean``, ``rank_worst``); empty without calls.
        All ranks of the ``job`` must ask."""
        with ranks.using(job):
            return self._imbalance()

    def loads(self, job: Ranks) -> dict[str, list[int]]:
        """Rows of each expert of all calls, by the model's numbers and names of layers. All ranks
        of the ``job`` must ask."""
        with ranks.using(job):
            own = self._loads()
        every = [own]
        if dist.is_initialized():
            every = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, own)
        return {name: rows for part in every for name, rows in sorted(part.items())}

    def _loads(self) -> dict[str, list[int]]:
        """Of the layers of this rank's stages."""
        by_layer: dict[str, list[_Call]] = {}
        known: dict[str, Layer] = {}
        for call in self.calls:
            if (layer := layer_of(call.layer)) is not None:
                by_layer.setdefault(layer.name, []).append(call)
                known[layer.name] = layer
        loads = {}
        for name, calls in sorted(by_layer.items()):
            rows = _added(calls, calls[0].axes).sum(0).flatten()
            places = known[name].places
            ordered = rows if places is None else rows[places.cpu()]
            loads[name] = [int(each) for each in ordered.tolist()]
        return loads

    def _imbalance(self) -> dict[str, Any]:
        expert, rank = _Ratios(), _Ratios()
        alike: dict[tuple[int, tuple[str, ...]], list[_Call]] = {}
        for call in self.calls:
            alike.setdefault((len(call.rows), call.axes), []).append(call)
        most = 1
        for (_, axes), calls in alike.items():
            rows = _added(calls, axes)
            expert.add(rows.flatten(1))
            rank.add(rows.sum(2))
            most = max(most, rows.shape[1])
        shared = _over_all(torch.tensor([float(most)]), "max")
        expert_mean, expert_worst = expert.over_all()
        rank_mean, rank_worst = rank.over_all()
        if not expert_worst:
            return {}
        return {
            "mean": expert_mean,
            "worst": expert_worst,
            "ranks": int(shared),
            "rank_mean": rank_mean,
            "rank_worst": rank_worst,
        }


@dataclass(slots=True)
class _Ratios:
    """The largest over the mean of each of ``count`` rows."""

    total: float = 0.0
    count: int = 0
    worst: float = 0.0

    def add(self, rows: Tensor) -> None:
        """``rows`` [calls, n]; calls without any routes say nothing."""
        used = rows[rows.sum(1) > 0]
        if len(used):
            ratio = used.max(1).values / used.mean(1)
            self.total += float(ratio.sum())
            self.count += len(used)
            self.worst = max(self.worst, float(ratio.max()))

    def over_all(self) -> tuple[float, float]:
        """(mean, worst) of all ranks' calls."""
        total, count = _over_all(torch.tensor([self.total, float(self.count)]), "sum").tolist()
        worst = float(_over_all(torch.tensor([self.worst]), "max"))
        return (total / count if count else 0.0), worst


def _added(calls: Sequence[_Call], axes: Sequence[str]) -> Tensor:
    """[calls, ranks along axes, own experts] rows of all ranks that compute the same layers."""
    here, mesh = ranks.current(), ranks.current().mesh
    rows = torch.stack([call.rows for call in calls])
    whole = rows.new_zeros(len(rows), here.size(*axes), rows.shape[1])
    whole[:, here.index(*axes)] = rows
    with not_counted():
        for axis in mesh.axes:
            if axis != PIPELINE and mesh.size(axis) > 1:
                whole = transport.all_reduce(whole, axis)
    return whole.double().cpu()


def _over_all(x: Tensor, op: str) -> Tensor:
    """Of all ranks of the job, which stages divide."""
    if not dist.is_initialized():
        return x
    x = x.double().to(ranks.current().device)
    with not_counted():
        dist.all_reduce(x, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
    return x.cpu()


_noted: list[RoutedRows] = []


@contextmanager
def noting() -> Iterator[RoutedRows]:
    """Notes the calls of experts that are made inside."""
    _noted.append(RoutedRows())
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


def is_noting() -> bool:
    """Whether a run notes calls."""
    return bool(_noted)


def note(rows: Tensor, axes: Sequence[str], layer: nn.Module | None = None) -> None:
    """``rows`` by own expert of one call of a ``layer``, whose experts are split over ``axes``,
    outermost first; nothing where no run notes, or where routes have no values."""
    if _noted and not rows.is_meta:
        _noted[-1].calls.append(_Call(rows.detach(), tuple(axes), layer))
