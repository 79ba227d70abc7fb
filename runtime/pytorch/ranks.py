"""Where this process stands in the device mesh, and its process groups by axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.lowering.state import ACROSS, INSIDE
from autopar.nouns.axes import PIPELINE
from autopar.nouns.mesh import Mesh
from autopar.runtime.shared.settings import ProgramError
from autopar.torch_private.distributed import group_of


class Ranks:
    """One process of a mesh. Axes of size 1 are dropped: they have no group and index 0.

    Every rank must ask for the same groups in the same order, since making one is collective.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        device: torch.device | None = None,
        alone: bool = False,
    ) -> None:
        """``sizes``: ranks by axis, outermost first; ``alone``: this process is a mesh of its own.

        Raises `ProgramError` where the number of processes is another one.
        """
        self.mesh = Mesh(tuple(sizes), tuple(sizes.values())).trimmed()
        self.named = tuple(sizes)
        """All axes, those of size 1 too."""
        self.device = device or torch.device("cpu")
        world = dist.get_world_size() if dist.is_initialized() and not alone else 1
        if world != self.mesh.device_count:
            raise ProgramError(
                f"the plan's mesh {self.mesh} has {self.mesh.device_count} ranks and {world} "
                f"processes run: start it with torchrun --nproc-per-node {self.mesh.device_count}"
            )
        self.rank = dist.get_rank() if world > 1 else 0
        self.coordinates = {a: self._coordinate(self.rank, a) for a in self.mesh.axes}
        if PIPELINE in self.mesh.axes[1:]:
            raise ProgramError(
                f"the mesh {self.mesh}: pp is the outermost axis, write it first in MESH"
            )
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self._along_pipeline: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._twins: dict[tuple[tuple[str, ...], str], dist.ProcessGroup] = {}
        self._halves: dict[str, dist.ProcessGroup] = {}
        self._device_mesh: DeviceMesh | None = None
        for axis in self.mesh.axes:
            self.group(axis)

    def _coordinate(self, rank: int, axis: str) -> int:
        return rank // self.mesh.stride(axis) % self.mesh.size(axis)

    @property
    def world(self) -> int:
        return self.mesh.device_count

    def size(self, *axes: str) -> int:
        """Ranks along all of ``axes`` together."""
        total = 1
        for axis in axes:
            total *= self.mesh.size(axis)
        return total

    def index(self, *axes: str) -> int:
        """This rank's place along ``axes``, the first axis varying slowest."""
        place = 0
        for axis in axes:
            place = place * self.mesh.size(axis) + self.coordinates.get(axis, 0)
        return place

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """Those that split the samples of the batch."""
        return self.mesh.sample_axes

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Those that split the batch."""
        return self.mesh.batch_axes

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along ``axes`` only; None where there is just one."""
        key = tuple(a for a in self.mesh.axes if a in axes)
        if not key:
            return None
        if key not in self._groups:
            if key == self.mesh.axes and dist.group.WORLD is not None:
                self._groups[key] = dist.group.WORLD
            else:
                self._groups[key] = group_of(self._own_ranks(key), "+".join(key))
        return self._groups[key]

    def two_level_groups(
        self, axes: Sequence[str], inside: int
    ) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """(inside, across) of this rank: each run of ``inside`` ranks along ``axes``, and those of
        the same place in every run. Groups of their own, since another thread may use them.

        Raises `ProgramError` where runs do not make up the ranks.
        """
        named, lines = "+".join(axes), self.members(*axes)
        if inside < 2 or len(lines[0]) % inside or len(lines[0]) == inside:
            raise ProgramError(
                f"two_level={inside}: there are {len(lines[0])} ranks along {named}, which must be "
                "several runs of as many, 2 or more"
            )
        runs = {
            INSIDE: [line[i : i + inside] for line in lines for i in range(0, len(line), inside)],
            ACROSS: [line[i::inside] for line in lines for i in range(inside)],
        }
        for where, members in runs.items():
            own = next(line for line in members if self.rank in line)
            self._halves[named + where] = group_of(own, named + where)
        return self._halves[named + INSIDE], self._halves[named + ACROSS]

    def _twin(self, axes: tuple[str, ...], of: str) -> dist.ProcessGroup | None:
        """A second group of the ranks along ``axes``."""
        if (axes, of) not in self._twins:
            self._twins[axes, of] = group_of(self._own_ranks(axes), f"{'+'.join(axes)} for {of}")
        return self._twins[axes, of]

    def pipeline_group(self, places: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Those of the ranks along ``pp`` that stand at ``places``, each of which must ask for it;
        None for one place, or where this rank stands at none of them."""
        if len(places) == 1:
            return None
        if len(places) == self.size(PIPELINE):
            return self.group(PIPELINE)
        if self.index(PIPELINE) not in places:
            return None
        if places not in self._along_pipeline:
            ranks = self._own_ranks((PIPELINE,))
            what = f"{PIPELINE}[{','.join(map(str, places))}]"
            self._along_pipeline[places] = group_of([ranks[i] for i in places], what)
        return self._along_pipeline[places]

    def axes_of(self, group: dist.ProcessGroup) -> str:
        """The axes of a group that this mesh made, as ``"dp_replicate+dp_shard"``; of some places
        of a pipeline ``"pp[0,3]"``; of an all-reduce on two levels ``"dp_replicate/inside"``."""
        for places, part in self._along_pipeline.items():
            if part.group_name == group.group_name:
                return f"pp[{','.join(map(str, places))}]"
        for named, half in self._halves.items():
            if half.group_name == group.group_name:
                return named
        for key, known in self._groups.items():
            if known.group_name == group.group_name:
                return "+".join(key)
        for (axes, _), twin in self._twins.items():
            if twin.group_name == group.group_name:
                return "+".join(axes)
        members = dist.get_process_group_ranks(group)
        if len(members) == self.world:
            return "+".join(self.mesh.axes)
        return f"ranks {members}"

    def members(self, *axes: str) -> list[list[int]]:
        """All groups of ranks along ``axes``, each in order of its place."""
        rest = [a for a in self.mesh.axes if a not in axes]
        groups = []
        for fixed in itertools.product(*(range(self.mesh.size(a)) for a in rest)):
            base = sum(i * self.mesh.stride(a) for a, i in zip(rest, fixed, strict=True))
            moving = itertools.product(*(range(self.mesh.size(a)) for a in axes))
            groups.append(
                [
                    base + sum(i * self.mesh.stride(a) for a, i in zip(axes, m, strict=True))
                    for m in moving
                ]
            )
        return groups

    def device_mesh(self, dims: Sequence[tuple[str, ...]], of: str = "") -> DeviceMesh:
        """A `DeviceMesh` on this rank's own groups, each dim of some axes together, in mesh order;
        on groups of its own with a name ``of`` what it is for, which all of its ranks must ask
        for."""
        dims = [axes for axes in dims if self.size(*axes) > 1]
        groups = [self._twin(axes, of) if of else self.group(*axes) for axes in dims]
        ranks = torch.tensor(self._own_ranks([a for axes in dims for a in axes]))
        known = [g for g in groups if g is not None]
        single = len(known) == 1
        return DeviceMesh.from_group(
            known[0] if single else known,
            self.device.type,
            mesh=ranks.reshape([self.size(*axes) for axes in dims]) if not single else None,
            mesh_dim_names=tuple("_".join(axes) for axes in dims),
        )

    def _own_ranks(self, axes: Sequence[str]) -> list[int]:
        return next(g for g in self.members(*axes) if self.rank in g)


_current: list[Ranks] = []


def current() -> Ranks:
    """The mesh that programs are being built or run on; `ProgramError` outside of a trainer."""
    if not _current:
        raise ProgramError(
            "no mesh is in use: an emitted model is built and called by autopar.load(plan), "
            "or inside `with using(Ranks(MESH)):`"
        )
    return _current[-1]


@contextmanager
def using(ranks: Ranks) -> Iterator[Ranks]:
    """Makes ``ranks`` the `current` mesh."""
    _current.append(ranks)
    try:
        yield ranks
    finally:
        _current.pop()
