"""Under which names, and in which parts, Hugging Face saves a model's tensors.

transformers stacks the experts of a layer into one parameter, and keeps the files as they were: one
tensor for each expert and product. How a parameter is cut is asked of transformers itself: what it
does to tensors before it saves them is done to tensors without memory, and a view says by its
strides which region of the parameter it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.runtime.pytorch.checkpoint_pieces import Piece, Pieces
from autopar.runtime.pytorch.parameters import Region, region_shape
from autopar.torch_private.modes import TorchDispatchMode
from autopar.torch_private.tensors import memory_of


@dataclass(frozen=True, slots=True)
class Part:
    """``region`` of a parameter, saved as ``name`` without the dims ``stacked``, of size 1."""

    name: str
    region: Region
    stacked: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.without(region_shape(self.region))

    def without(self, of_dims: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(x for d, x in enumerate(of_dims) if d not in self.stacked)


Parts = Mapping[str, Sequence[Part]]


def parts_of(model: nn.Module) -> dict[str, tuple[Part, ...]]:
    """For each parameter of ``model`` that Hugging Face saves otherwise than as it is its parts;
    none where that is no cut into parts, or the model none of Hugging Face."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return {}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5 models have the names of their files
        return {}
    made: dict[str, tuple[Part, ...]] = {}
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        try:
            with _WithoutCopies():  # type: ignore[no-untyped-call]
                saved: Mapping[str, Any] = revert_weight_conversion(model, {name: whole})
        except Exception:  # of whatever kind: what is saved is made of several parameters at once
            continue
        parts = [_part(saved_as, view, whole) for saved_as, view in saved.items()]
        if list(saved) == [name] or None in parts:
            continue
        known = tuple(part for part in parts if part is not None)
        if sum(torch.Size(part.shape).numel() for part in known) == whole.numel():
            made[name] = known
    return made


class _WithoutCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, a copy is the tensor itself, so that it is known where its numbers are from."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def _part(name: str, view: torch.Tensor, whole: torch.Tensor) -> Part | None:
    """Which region of ``whole`` a ``view`` of it is; None where it is none."""
    if memory_of(view) != memory_of(whole):
        return None
    starts, rest = [], int(view.storage_offset())
    for stride in whole.stride():
        starts.append(rest // stride)
        rest %= stride
    axes = list(zip(view.shape, view.stride(), strict=True))
    region, stacked = [], []
    for dim, (start, size, stride) in enumerate(
        zip(starts, whole.shape, whole.stride(), strict=True)
    ):
        if axes and axes[0][1] == stride and start + axes[0][0] <= size:
            region.append(slice(start, start + axes.pop(0)[0]))
        else:
            region.append(slice(start, start + 1))
            stacked.append(dim)
    return None if axes or rest else Part(name, tuple(region), tuple(stacked))


def in_parts(pieces: Pieces, parts: Parts) -> list[tuple[str, Piece]]:
    """``pieces`` by the names of files: of a parameter that is saved in ``parts``, what this rank
    has of each, as views. Of what does not lie as in files, a name as often as it is cut."""
    made: list[tuple[str, Piece]] = []
    for name, piece in pieces.items():
        for own in piece.parts():
            made += _of_parts(own, parts[name]) if name in parts else [(name, own)]
    return made


def _of_parts(piece: Piece, parts: Sequence[Part]) -> Iterator[tuple[str, Piece]]:
    for part in parts:
        here, there = [], []
        for own, whole in zip(piece.region, part.region, strict=True):
            start, stop = max(own.start, whole.start), min(own.stop, whole.stop)
            here.append(slice(start - own.start, stop - own.start))
            there.append(slice(start - whole.start, stop - whole.start))
        if all(s.start < s.stop for s in there):
            view = piece.tensor[tuple(here)]
            for dim in reversed(part.stacked):
                view = view.squeeze(dim)
            yield part.name, Piece(view, part.without(there), part.shape)
