"""Ranks as threads of one process: collectives are exchanges through a shared table.

One rank computes at a time; it hands on where it waits for the others. Several threads that are the
first to use a kernel of torch at the same moment get float64 results that are off by 1e-10 now and
then, which real ranks, each a process, cannot do to one another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch import ranks, transport

_here = threading.local()


@dataclass
class World:
    """``log`` has (kind, axis, bytes of the full-size side) of rank 0's collectives, in order."""

    mesh: Mesh
    barrier: threading.Barrier
    turn: threading.Lock = field(default_factory=threading.Lock)
    slots: list[Any] = field(default_factory=list)
    log: list[tuple[str, str, int]] = field(default_factory=list)

    def exchange(self, value: torch.Tensor, axis: str) -> list[torch.Tensor]:
        """What the ranks of this rank's group along ``axis`` put in, in order."""
        rank = _here.ranks.rank
        self.slots[rank] = (axis, value)
        self.wait()
        stride, size = self.mesh.stride(axis), self.mesh.size(axis)
        first = rank - rank // stride % size * stride
        pieces = [self.slots[first + i * stride] for i in range(size)]
        self.wait()
        assert all(a == axis for a, _ in pieces), "ranks are in different collectives"
        return [v for _, v in pieces]

    def wait(self) -> None:
        """Until all ranks are here."""
        self.turn.release()
        try:
            self.barrier.wait(60)
        finally:
            self.turn.acquire()

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


@contextmanager
def _patched() -> Iterator[None]:
    functions = {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
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
    world = World(mesh, threading.Barrier(count), slots=[None] * count)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        _here.world = world
        _here.ranks = SimpleNamespace(
            mesh=mesh,
            rank=rank,
            device=torch.device("cpu"),
            coordinates={a: rank // mesh.stride(a) % mesh.size(a) for a in mesh.axes},
        )
        _here.ranks.index = partial(ranks.Ranks.index, _here.ranks)
        try:
            with world.turn:
                results[rank] = task(_here.ranks)
        except BaseException as error:
            errors.append(error)
            world.barrier.abort()

    with _patched():
        threads = [threading.Thread(target=work, args=(r,)) for r in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if real or errors:
        raise (real or errors)[0]
    return results, world


def total(value: torch.Tensor, axes: Iterable[str]) -> torch.Tensor:
    """The sum over ``axes``, on every rank; for one that runs, and nothing is noted."""
    for axis in axes:
        value = torch.stack(_here.world.exchange(value, axis)).sum(0)
    return value
