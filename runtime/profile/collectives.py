"""The collectives that `autopar profile` measures, as emitted programs issue them.

Each runs over all groups of a mesh axis at once, packing included, after a piece of compute: ranks
then arrive a little apart, and the communication threads have to get hold of their cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from autopar.nouns.axes import EXPERT, REPLICATE, TENSOR
from autopar.runtime.profile.figures import PIECES, SIZES, groups
from autopar.runtime.pytorch import ranks as rank_state
from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.collectives import all_gather_dim, all_to_all_dims, reduce_scatter_dim
from autopar.runtime.pytorch.ranks import Ranks

AXIS = TENSOR


@dataclass(frozen=True)
class Exchange:
    """A collective of ``size_bytes`` (its full-size side) over ``size`` ranks ``stride`` apart."""

    kind: str
    size: int
    stride: int
    size_bytes: int
    call: Callable[[], object]

    @property
    def key(self) -> str:
        return f"{self.kind} {self.size}x{self.stride}"


def exchanges(world: int, device: torch.device) -> Iterator[Exchange]:
    """Every collective over every group, smallest first. All ranks run through it alike."""
    for size, stride in groups(world):
        mesh = _mesh(world, size, stride, device)
        for size_bytes in SIZES:
            for kind, call in _calls(mesh, size, size_bytes, device):
                yield Exchange(kind, size, stride, size_bytes, _using(mesh, call))


def _using(mesh: Ranks, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with rank_state.using(mesh):
            return call()

    return run


def _calls(
    mesh: Ranks, size: int, size_bytes: int, device: torch.device
) -> Iterator[tuple[str, Callable[[], object]]]:
    columns = size_bytes // 4 // PIECES // size * size
    whole = torch.rand(PIECES, columns, device=device)
    part = torch.rand(PIECES, columns // size, device=device)
    other = torch.empty_like(whole)
    group = mesh.group(AXIS)
    members = next(g for g in mesh.members(AXIS) if mesh.rank in g)
    here = members.index(mesh.rank)
    after, before = members[(here + 1) % size], members[here - 1]

    def send() -> None:
        jobs = [dist.isend(whole, after, group), dist.irecv(other, before, group)]
        for job in jobs:
            if job is not None:
                job.wait()

    yield "all_reduce", lambda: transport.all_reduce(whole, AXIS)
    yield "all_gather", lambda: all_gather_dim(part, 1, AXIS)
    yield "reduce_scatter", lambda: reduce_scatter_dim(whole, 1, AXIS)
    yield "all_to_all", lambda: all_to_all_dims(whole, 1, 0, AXIS)
    yield "broadcast", lambda: dist.broadcast(other, members[0], group)
    yield "p2p", send


class Unit:
    """Parameters of ``size_bytes`` as DDP and FSDP2 hold them over one group: what moving them
    and their gradients adds to a step, the copies in and out of buffers included."""

    def __init__(self, mesh: Ranks, size_bytes: int, device: torch.device) -> None:
        axis = mesh.device_mesh([(AXIS,)])
        width = 256
        rows = size_bytes // 4 // width // _LAYERS
        # Enough rows to compute for a while: ranks then come to a collective a little apart.
        self._x = torch.rand(128, width, device=device)
        plain, sharded, replicated = (_Layers(rows, width).to(device) for _ in range(3))
        self._plain = plain
        self._gradients = torch.rand(rows * width * _LAYERS, device=device)
        self._group = mesh.group(AXIS)
        # Makes an `FSDPModule` of the module that it is given.
        self._held = fully_shard(sharded, mesh=axis, reshard_after_forward=False)
        self._sharded = sharded
        self._replicated = DistributedDataParallel(
            replicated, process_group=mesh.group(AXIS), gradient_as_bucket_view=True
        )

    def _step(self, model: torch.nn.Module) -> None:
        for p in model.parameters():
            p.grad = None
        model(self._x).backward()

    def plain(self) -> None:
        self._step(self._plain)

    def sharded(self) -> None:
        self._step(self._sharded)

    def replicated(self) -> None:
        self._step(self._replicated)

    def reduce(self) -> None:
        dist.all_reduce(self._gradients, group=self._group)

    def gather(self) -> None:
        self._held.unshard()
        self._held.reshard()


class _Layers(torch.nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        made = (torch.nn.Linear(width, rows, bias=False) for _ in range(_LAYERS))
        self.layers = torch.nn.ModuleList(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()


_LAYERS = 4
UNIT_SIZES = tuple(1 << power for power in (18, 20, 22, 24, 26))  # 256 KiB to 64 MiB


def units(world: int, device: torch.device) -> Iterator[tuple[str, int, Callable[[], Unit]]]:
    """(group, bytes, what makes the unit) of every unit to measure."""
    for size, stride in groups(world):
        mesh = _mesh(world, size, stride, device)
        for size_bytes in UNIT_SIZES:
            yield f"{size}x{stride}", size_bytes, partial(Unit, mesh, size_bytes, device)


def _mesh(world: int, size: int, stride: int, device: torch.device) -> Ranks:
    outer = world // (size * stride)
    return Ranks({REPLICATE: outer, AXIS: size, EXPERT: stride}, device)


class Overlap:
    """Compute beside a collective that runs on its own: what hiding it costs."""

    def __init__(self, world: int, device: torch.device) -> None:
        self._sent = torch.rand(1 << 20, device=device)
        self._matrix = torch.rand(256, 256, device=device)
        self._products = 64

    def compute(self) -> None:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)

    def collective(self) -> None:
        dist.all_reduce(self._sent)

    def both(self) -> None:
        work = dist.all_reduce(self._sent, async_op=True)
        self.compute()
        if work is not None:
            work.wait()
