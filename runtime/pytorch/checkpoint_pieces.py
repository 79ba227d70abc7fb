"""Pieces of tensors, and how torch's checkpoints are told which rank writes and reads which."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autopar.runtime.pytorch.expert_places import Order, runs
from autopar.runtime.pytorch.parameters import Region, region_shape
from autopar.runtime.shared.checkpoint_folder import CheckpointError


@dataclass(frozen=True, slots=True)
class Piece:
    """A local tensor as the ``region`` of a tensor of global ``shape``; of experts that are placed
    by place, with the ``order`` in which they lie."""

    tensor: torch.Tensor
    region: Region
    shape: tuple[int, ...]
    order: Order = None

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

    def parts(self) -> list[Piece]:
        """The same in the order of the model, as views: one where it lies so."""
        if self.order is None:
            return [self]
        cut = runs(self.region, self.order)
        return [Piece(self.tensor[rows], region, self.shape) for rows, region in cut]


Pieces = Mapping[str, Piece]


def parts_of_all(pieces: Pieces) -> list[tuple[str, Piece]]:
    """All that is not empty as files have it, each name as often as its parts."""
    every = ((name, part) for name, piece in pieces.items() for part in piece.parts())
    return [(name, part) for name, part in every if not part.empty]


def _by_chunk(pieces: Pieces) -> dict[tuple[str, torch.Size], torch.Tensor]:
    """Tensors by name and where they begin in the whole."""
    return {(name, part.chunk.offsets): part.tensor for name, part in parts_of_all(pieces)}


class Saver(DefaultSavePlanner):
    """Writes pieces; those that several ranks hold are written by one of them."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__()
        self._pieces = parts_of_all(pieces)
        self._tensors = _by_chunk(pieces)

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
            for name, piece in self._pieces
        ]
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        assert index.offset is not None
        return self._tensors[index.fqn, index.offset]


class Loader(DefaultLoadPlanner):
    """Reads pieces, wherever the chunks of the checkpoint were cut."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__()
        self._pieces = pieces
        self._tensors = _by_chunk(pieces)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return LoadPlan(read_items(self.metadata, self._pieces))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._tensors[index.fqn, index.offset]


def read_items(metadata: Metadata, pieces: Pieces) -> list[ReadItem]:
    """Which parts of which chunks this rank reads. Raises `CheckpointError` for a hole."""
    items: list[ReadItem] = []
    for name, piece in parts_of_all(pieces):
        stored = metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        own = create_read_items_for_chunk_list(name, stored, [piece.chunk])
        if sum(math.prod(item.lengths) for item in own) != math.prod(piece.chunk.sizes):
            raise CheckpointError(
                f"the checkpoint does not hold all of {name} {list(piece.shape)}: it is part of "
                "one, or was put together of several; give another checkpoint"
            )
        items += own
    return items
