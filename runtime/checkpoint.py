"""Checkpoints of the whole model, written and read piece by piece.

The folder is one of `torch.distributed.checkpoint` with the names of the whole model:
``model.<name>``, ``optimizer.<state>.<name>``, ``step`` and ``rng.<rank>``. Each rank writes and
reads the regions that it holds, so any plan reads what any other plan wrote, and so does a plain
model on one device (`load_plain`).
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autopar.runtime.parameters import Region, region_shape
from autopar.runtime.recording import named_tensors
from autopar.runtime.save_target import CheckpointError, check_target


@dataclass(frozen=True, slots=True)
class Piece:
    """A local tensor as the ``region`` of a tensor of global ``shape``."""

    tensor: torch.Tensor
    region: Region
    shape: tuple[int, ...]

    @staticmethod
    def whole(tensor: torch.Tensor) -> Piece:
        return Piece(tensor, tuple(slice(0, n) for n in tensor.shape), tuple(tensor.shape))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        offsets = torch.Size([s.start for s in self.region])
        return ChunkStorageMetadata(offsets, torch.Size(region_shape(self.region)))

    @property
    def empty(self) -> bool:
        return 0 in region_shape(self.region)


Pieces = Mapping[str, Piece]


class _Saver(DefaultSavePlanner):
    """Writes pieces; those that several ranks hold are written by one of them."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                MetadataIndex(name, piece.chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    piece.chunk,
                    TensorProperties.create_from_tensor(piece.tensor),
                    torch.Size(piece.shape),
                ),
            )
            for name, piece in self._pieces.items()
            if not piece.empty
        ]
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._pieces[index.fqn].tensor


class _Loader(DefaultLoadPlanner):
    """Reads pieces, wherever the chunks of the checkpoint were cut."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self._pieces.items():
            if not piece.empty:
                stored = self.metadata.state_dict_metadata[name]
                assert isinstance(stored, TensorStorageMetadata)
                items += create_read_items_for_chunk_list(name, stored, [piece.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._pieces[index.fqn].tensor


def write(folder: str | Path, pieces: Pieces) -> None:
    """Writes ``folder`` whole or not at all; all ranks call it. Replaces an older checkpoint.

    Raises `CheckpointError` where the folder holds something else.
    """
    check_target(folder, "torch")
    target = Path(folder).absolute()
    new = _beside(target, "saving")
    alone = not dist.is_initialized()
    if alone or dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    _barrier()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is so
        save(
            {name: piece.tensor for name, piece in pieces.items()},
            storage_writer=FileSystemWriter(new),
            planner=_Saver(pieces),
            no_dist=alone,
        )
    _barrier()
    if alone or dist.get_rank() == 0:
        old = _beside(target, "old")
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            os.rename(target, old)  # `read` takes the old one if we die before the next line
        os.rename(new, target)
        shutil.rmtree(old, ignore_errors=True)
    _barrier()


def read(folder: str | Path, pieces: Pieces, alone: bool = False) -> None:
    """Fills the tensors of ``pieces``; all ranks call it, or one of them ``alone``.

    Raises `CheckpointError` before anything is overwritten.
    """
    source = find(folder)
    stored = contents(source)
    missing = [name for name in pieces if name not in stored]
    if missing:
        raise CheckpointError(
            f"{source} has no {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''} "
            f"({len(missing)} of {len(pieces)} tensors): it was written for another model"
        )
    for name, piece in pieces.items():
        if stored[name] != piece.shape:
            raise CheckpointError(
                f"{name} has shape {list(stored[name])} in {source} and {list(piece.shape)} in "
                "the model: the checkpoint was written for another model"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is so
        load(
            {name: piece.tensor for name, piece in pieces.items()},
            storage_reader=FileSystemReader(source),
            planner=_Loader(pieces),
            no_dist=alone or not dist.is_initialized(),
        )


def find(folder: str | Path) -> Path:
    """Where the checkpoint ``folder`` lies: itself, or its last version if a write was cut off."""
    target = Path(folder).absolute()
    for place in (target, _beside(target, "old")):
        if (place / ".metadata").exists():
            return place
    raise CheckpointError(
        f"no checkpoint in {target}: `autopar run --save {folder}` writes one, or trainer.save"
    )


def contents(source: Path) -> dict[str, tuple[int, ...]]:
    """Global shape of every tensor in the checkpoint, by name."""
    stored = FileSystemReader(source).read_metadata().state_dict_metadata
    return {n: tuple(s.size) for n, s in stored.items() if isinstance(s, TensorStorageMetadata)}


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def optimizer_state(
    optimizer: torch.optim.Optimizer, leaf: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The optimizer's tensors shaped like ``leaf``, by name; zeros before the first step."""
    names = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ()}[type(optimizer).__name__]
    state = optimizer.state[leaf]
    for name in names:
        if name not in state:
            state[name] = torch.zeros_like(leaf)
    if names and "step" not in state:
        fused = optimizer.param_groups[0].get("fused", False)
        state["step"] = torch.zeros((), device=leaf.device if fused else None)
    return {name: state[name] for name in names}


def set_steps(optimizer: torch.optim.Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)


def load_plain(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Loads a checkpoint of any plan into the original model on one device; returns its step.

    ``optimizer`` is an AdamW or SGD over ``model``'s parameters. Tied parameters may be stored
    under any of their names. Raises `CheckpointError`.
    """
    source = find(folder)
    stored = contents(source)
    pieces: dict[str, Piece] = {}
    for name, tensor in _stored_under(model, stored).items():
        pieces[f"model.{name}"] = Piece.whole(tensor.detach())
        if optimizer is not None and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            for state, value in optimizer_state(optimizer, tensor).items():
                pieces[f"optimizer.{state}.{name}"] = Piece.whole(value)
    step = torch.zeros((), dtype=torch.int64)
    pieces["step"] = Piece.whole(step)
    read(folder, pieces, alone=True)
    if optimizer is not None:
        set_steps(optimizer, int(step))
    return int(step)


def _stored_under(model: nn.Module, stored: Iterable[str]) -> dict[str, torch.Tensor]:
    known = set(stored)
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_tensors(model):
        if id(tensor) not in found or f"model.{name}" in known:
            found[id(tensor)] = (name, tensor)
    return {n: t for n, t in found.values() if isinstance(t, nn.Parameter) or f"model.{n}" in known}


__all__ = ["CheckpointError", "Piece", "load_plain", "read", "write"]
