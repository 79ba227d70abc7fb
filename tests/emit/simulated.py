"""Ranks as threads of one process: collectives are exchanges through a shared table.

One rank computes at a time; it hands on where it waits for the others. Several threads that are the
first to use a kernel of torch at the same moment get float64 results that are off by 1e-10 now and
then, which real ranks, each a process, cannot do to one another.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch import ranks, transport

_here = threading.local()


class Abandoned(Exception):
    """Another rank has failed."""


@dataclass
class World:
    """``log`` has (kind, axis, bytes of the full-size side) of rank 0's collectives, in order.

    Ranks take turns in their order, from one exchange to the next: whose turn comes again knows
    that all others have put in what they have.
    """

    mesh: Mesh
    turns: list[threading.Lock]
    """Of each rank; the one that is free, or that is waited for by nobody, has its turn."""
    slots: tuple[list[Any], list[Any]]
    """By turns, so that none is written before all have read it."""
    log: list[tuple[str, str, int]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    failed: bool = False

    def exchange(self, value: Any, axis: str) -> list[Any]:
        """What the ranks of this rank's group along ``axis`` put in, in order."""
        rank = _here.ranks.rank
        _here.exchanges += 1
        slots = self.slots[_here.exchanges % 2]
        slots[rank] = (_here.exchanges, axis, value)
        self.hand_on(rank)
        self.take(rank)
        stride, size = self.mesh.stride(axis), self.mesh.size(axis)
        first = rank - rank // stride % size * stride
        pieces = [slots[first + i * stride] for i in range(size)]
        here = (_here.exchanges, axis)
        assert all(p is not None and p[:2] == here for p in pieces), (
            "ranks are in different collectives"
        )
        return [value for _, _, value in pieces]

    def take(self, rank: int) -> None:
        """Waits for this rank's turn, while all others compute one after the other."""
        if not self.turns[rank].acquire(timeout=300):
            raise TimeoutError(f"rank {rank} waits for the others")
        if self.failed:
            raise Abandoned

    def hand_on(self, rank: int) -> None:
        """To the next rank that has not ended."""
        count = len(self.turns)
        after = [
            r % count for r in range(rank + 1, rank + count + 1) if r % count not in self.ended
        ]
        if after:
            self.turns[after[0]].release()

    def note(self, kind: str, axis: str, numel: int, itemsize: int) -> None:
        if _here.ranks.rank == 0:
            self.log.append((kind, axis, numel * itemsize))


def _all_reduce(x: torch.Tensor, axis: str, op: str = "sum") -> torch.Tensor:
    world = _here.world
    world.note("all_reduce", axis, x.numel(), x.element_size())
    parts = torch.stack(world.exchange(x.detach(), axis))
    return parts.sum(0, dtype=x.dtype) if op == "sum" else parts.amax(0)


def _all_gather(x: torch.Tensor, axis: str) -> torch.Tensor:
    world = _here.world
    world.note("all_gather", axis, x.numel() * world.mesh.size(axis), x.element_size())
    return torch.cat(world.exchange(x.detach(), axis))


def _reduce_scatter(x: torch.Tensor, axis: str) -> torch.Tensor:
    world = _here.world
    world.note("reduce_scatter", axis, x.numel(), x.element_size())
    total = torch.stack(world.exchange(x.detach(), axis)).sum(0, dtype=x.dtype)
    return total.chunk(world.mesh.size(axis))[transport.index(axis)].clone()


def _all_to_all(x: torch.Tensor, axis: str) -> torch.Tensor:
    world = _here.world
    world.note("all_to_all", axis, x.numel(), x.element_size())
    here, size = transport.index(axis), world.mesh.size(axis)
    return torch.cat([p.chunk(size)[here] for p in world.exchange(x.detach(), axis)])


def _begin_shift(x: torch.Tensor, axis: str, by: int = 1) -> torch.Tensor:
    world = _here.world
    world.note("shift", axis, x.numel(), x.element_size())
    arrived: list[torch.Tensor] = world.exchange(x.detach().flatten(), axis)
    own: torch.Tensor = arrived[(transport.index(axis) - by) % world.mesh.size(axis)]
    return own.clone()


def _all_to_all_rows(
    x: torch.Tensor, sent: Sequence[int], received: Sequence[int], axis: str, counted: int
) -> torch.Tensor:
    world = _here.world
    world.note("all_to_all", axis, counted * math.prod(x.shape[1:]), x.element_size())
    here, size = transport.index(axis), world.mesh.size(axis)
    assert len(sent) == len(received) == size
    cut = torch.split(x.detach(), list(sent))
    pieces = [each[here] for each in world.exchange(cut, axis)]
    assert [len(piece) for piece in pieces] == list(received)
    return torch.cat(pieces)


@contextmanager
def _patched() -> Iterator[None]:
    functions = {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "begin_all_reduce": _all_reduce,
        "begin_all_gather": _all_gather,
        "begin_reduce_scatter": _reduce_scatter,
        "begin_shift": _begin_shift,
        "wait": lambda x: x,
        "begin_all_to_all_rows": _all_to_all_rows,
    }
    before = {name: getattr(transport, name) for name in functions}
    current = ranks.current
    try:
        for name, function in functions.items():
            setattr(transport, name, function)
        ranks.current = lambda: _here.ranks
        yield
    finally:
        for name, function in before.items():
            setattr(transport, name, function)
        ranks.current = current


def run(mesh: Mesh, task: Callable[[Any], Any]) -> tuple[list[Any], World]:
    """``task(ranks)`` on every rank of ``mesh``; the results in rank order."""
    count = mesh.device_count
    turns = [threading.Lock() for _ in range(count)]
    world = World(mesh, turns, ([None] * count, [None] * count))
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        _here.world, _here.exchanges = world, 0
        _here.ranks = SimpleNamespace(
            mesh=mesh,
            named=mesh.axes,
            rank=rank,
            device=torch.device("cpu"),
            coordinates={a: rank // mesh.stride(a) % mesh.size(a) for a in mesh.axes},
        )
        _here.ranks.index = partial(ranks.Ranks.index, _here.ranks)
        try:
            world.take(rank)
            results[rank] = task(_here.ranks)
        except BaseException as error:
            errors.append(error)
            world.failed = True
        world.ended.add(rank)
        world.hand_on(rank)

    for turn in turns[1:]:
        turn.acquire()
    with _patched():
        threads = [threading.Thread(target=work, args=(r,)) for r in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    real = [e for e in errors if not isinstance(e, Abandoned)]
    if real or errors:
        raise (real or errors)[0]
    return results, world


def total(value: torch.Tensor, axes: Iterable[str]) -> torch.Tensor:
    """The sum over ``axes``, on every rank; for one that runs, and nothing is noted."""
    for axis in axes:
        value = torch.stack(_here.world.exchange(value, axis)).sum(0)
    return value
