"""Declaring parameters and buffers of an emitted program, and reading them in its forward.

A declaration gives the global shape and the sharding over the model axes; what is made is the
piece of this rank, on the meta device, with no memory behind it. `runtime.pytorch.storage` decides
how it is held (plain, by DDP, by FSDP2) and fills it in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from autopar.nouns.axes import BATCH
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding
from autopar.runtime.pytorch import ranks
from autopar.runtime.shared.settings import ProgramError

Region = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Declared:
    """What a program says of a tensor: global shape, dtype, placement by model axis; ``placed``:
    its first dim is of experts, which lie as the program's settings place them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: Sharding
    placed: bool = False

    def deferred_axes(self) -> tuple[str, ...]:
        """The axes over which the gradient is a partial sum on each rank until the step's end."""
        return tuple(a for a, p in self.sharding.placements if p.kind == "D")

    def region(self, mesh: Mesh, coordinates: Mapping[str, int]) -> Region:
        """The piece of the global tensor that the rank at ``coordinates`` computes with."""
        region = tuple(slice(0, n) for n in self.shape)
        for axis, placement in self.sharding.placements:
            if placement.kind == "S" and mesh.size(axis) > 1:
                region = cut(region, placement.dim, mesh.size(axis), coordinates[axis])
        return region


def cut(region: Region, dim: int, pieces: int, index: int) -> Region:
    """Piece ``index`` of ``region`` along ``dim``, sizes as `torch.chunk` gives them."""
    whole = region[dim]
    step = -(-(whole.stop - whole.start) // pieces)
    start = min(whole.start + index * step, whole.stop)
    return (*region[:dim], slice(start, min(start + step, whole.stop)), *region[dim + 1 :])


def region_shape(region: Region) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in region)


_declared: dict[int, tuple[torch.Tensor, Declared]] = {}
_compute_dtype: torch.dtype | None = None
_lifted: torch.dtype | None = None


def Parameter(
    shape: tuple[int, ...],
    sharding: str = "",
    dtype: str = "float32",
    trainable: bool = True,
    placed: bool = False,
) -> nn.Parameter:
    """This rank's piece of a parameter of global ``shape``, without memory until it is stored.

    ``sharding`` speaks of model axes only: ``"tp:S0"`` split, ``""`` whole with a whole gradient,
    ``"tp:D"`` whole with a gradient that is a partial sum, summed over ``tp`` once a step.
    ``placed``: rows of its first dim are experts, which lie as ``SETTINGS.placed`` has them.
    """
    declared = _declare(shape, sharding, dtype, placed)
    made = nn.Parameter(_piece(declared), requires_grad=trainable)
    _declared[id(made)] = (made, declared)
    return made


def Buffer(
    shape: tuple[int, ...], sharding: str = "", dtype: str = "float32", persistent: bool = True
) -> nn.Buffer:
    """This rank's piece of a buffer; arguments as for `Parameter`."""
    declared = _declare(shape, sharding, dtype)
    made = nn.Buffer(_piece(declared), persistent=persistent)
    _declared[id(made)] = (made, declared)
    return made


def _declare(shape: tuple[int, ...], sharding: str, dtype: str, placed: bool = False) -> Declared:
    parsed, axes = Sharding.parse(sharding or "R"), ranks.current().named
    for axis, placement in parsed.placements:
        if placement.kind == "P" or (axis in BATCH and placement.kind != "S"):
            raise ProgramError(
                f"sharding {sharding!r}: a parameter is S<dim>, R or D on model axes, S<dim> or "
                "nothing on those of the batch; the rest follows from SETTINGS.zero"
            )
        if axis not in axes:
            raise ProgramError(
                f"sharding {sharding!r}: MESH has no axis {axis}, it has "
                f"{', '.join(axes) or 'none'}; name one of these, or plan the model again"
            )
    return Declared(tuple(shape), lifted_to(getattr(torch, dtype)), parsed, placed)


def lifted_to(dtype: torch.dtype) -> torch.dtype:
    """``dtype`` as it is inside of `lifted`."""
    if _lifted is not None and dtype.is_floating_point:
        return _lifted
    if _lifted is not None and dtype.is_complex:
        return _lifted.to_complex()
    return dtype


def _piece(declared: Declared) -> torch.Tensor:
    here = ranks.current()
    region = declared.region(here.mesh, here.coordinates)
    if 0 in region_shape(region) and 0 not in declared.shape:
        raise ProgramError(
            f"shape {list(declared.shape)} split as {declared.sharding} on {here.mesh} leaves "
            f"rank {here.rank} no rows: use fewer ranks on that axis"
        )
    return torch.empty(region_shape(region), dtype=declared.dtype, device="meta")


def declared_in(module: nn.Module) -> tuple[dict[str, Declared], dict[str, Declared]]:
    """(parameters, buffers) of a freshly built program by name, tied ones under their first name.

    Raises `ProgramError` for a tensor that was not made by `Parameter` or `Buffer`.
    """
    tables: list[dict[str, Declared]] = []
    for named in (module.named_parameters(), module.named_buffers()):
        table = {}
        for name, tensor in named:
            kept = _declared.get(id(tensor))
            if kept is None or kept[0] is not tensor:
                raise ProgramError(f"{name} of the program was not made by Parameter() or Buffer()")
            table[name] = kept[1]
        tables.append(table)
    for tensor in (*module.parameters(), *module.buffers()):
        _declared.pop(id(tensor), None)
    return tables[0], tables[1]


def local(parameter: torch.Tensor) -> torch.Tensor:
    """The value to compute with: this rank's piece in the dtype of compute.

    float32 is replaced by ``SETTINGS.precision``; other dtypes stay as declared. Under FSDP2 the
    gathered piece already has that dtype and nothing happens here.
    """
    if _compute_dtype is None or parameter.dtype is not torch.float32:
        return parameter
    return parameter.to(_compute_dtype)


def as_computed(value: object) -> object:
    """``value`` in the dtype of compute where it is a float32 tensor, as `local` has parameters."""
    return local(value) if isinstance(value, torch.Tensor) else value


@contextmanager
def computing(dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, `local` replaces float32 by ``dtype`` (None: by nothing)."""
    global _compute_dtype
    before, _compute_dtype = _compute_dtype, dtype
    try:
        yield
    finally:
        _compute_dtype = before


@contextmanager
def lifted(dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, every floating parameter and buffer is declared as ``dtype`` instead of its own."""
    global _lifted
    before, _lifted = _lifted, dtype
    try:
        yield
    finally:
        _lifted = before


@contextmanager
def running(
    here: ranks.Ranks, precision: str = "float32", lift: torch.dtype | None = None
) -> Iterator[None]:
    """Inside, programs are built and run on this rank and compute in ``precision``; with ``lift``
    they are declared in it, see `lifted`."""
    dtype = getattr(torch, precision)
    with ranks.using(here), computing(None if dtype is torch.float32 else dtype), lifted(lift):
        yield
