"""Checkpoints of the whole model, written and read piece by piece.

The folder is one of `torch.distributed.checkpoint` with the names of the whole model:
``model.<name>``, ``optimizer.<state>.<name>``, ``step`` and ``rng.<rank>``, and has the digests of
its files (`runtime.shared.checkpoint_folder`). Each rank writes and reads the regions that it
holds, so any plan reads what any other plan wrote, and so does a plain model on one device
(`load_plain`).
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autopar.runtime.pytorch.agreement import together
from autopar.runtime.pytorch.checkpoint_pieces import Loader, Piece, Pieces, Saver, read_items
from autopar.runtime.pytorch.optimizer_state import optimizer_state, set_steps
from autopar.runtime.pytorch.recording import named_tensors
from autopar.runtime.shared.checkpoint_folder import (
    CheckpointError,
    File,
    check_digests,
    check_names,
    file_of,
    find,
    read_manifest,
)
from autopar.runtime.shared.save_target import Saving, not_written, place_for

METADATA = ".metadata"
BROKEN = (OSError, RuntimeError, ValueError, KeyError, CheckpointException)
"""What torch raises where a checkpoint cannot be written or read."""


class HalfLoaded(CheckpointError):
    """Reading, or an update, broke off in its middle: some tensors are of one state, some of
    another."""


def write(folder: str | Path, pieces: Pieces, group: dist.ProcessGroup | None = None) -> None:
    """Writes ``folder`` whole or not at all; all ranks call it. Replaces an older checkpoint.

    ``group``: all ranks again, for one that is written while they train. Raises `CheckpointError`
    on every rank where it cannot be written, or holds something else.
    """
    target = Path(folder).absolute()
    alone = not dist.is_initialized()
    first = alone or dist.get_rank() == 0
    made: list[Saving] = []
    try:
        together(lambda: made.append(Saving.of(target, "torch")) if first else None, group=group)
        files = together(lambda: _write_pieces(target, pieces, alone, group), group=group)
        every: list[dict[str, File]] = [files]
        if not alone:
            every = [{}] * dist.get_world_size()
            dist.all_gather_object(every, files, group=group)
        whole = {name: file for part in every for name, file in part.items()}
        together(lambda: made[0].finish(whole) if first else None, group=group)
    finally:
        for saving in made:
            saving.release()


def _write_pieces(
    target: Path, pieces: Pieces, alone: bool, group: dist.ProcessGroup | None
) -> dict[str, File]:
    """Writes this rank's files; the digests of them, by name. Raises `CheckpointError`."""
    new = place_for(target)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is so
            save(
                {name: piece.tensor for name, piece in pieces.items()},
                storage_writer=FileSystemWriter(new),
                planner=Saver(pieces),
                process_group=group,
                no_dist=alone,
            )
        rank = 0 if alone else dist.get_rank()
        own = [*new.glob(f"__{rank}_*"), *([new / METADATA] if rank == 0 else [])]
        return {file.name: file_of(file) for file in own}
    except BROKEN as error:
        raise not_written(target, _cause(error)) from error


def _cause(error: BaseException) -> Exception:
    """What a rank of torch's checkpoint raised first."""
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return error if isinstance(error, Exception) else RuntimeError(str(error))


Choose = Callable[[Mapping[str, Any]], Pieces]


def read(
    folder: str | Path,
    pieces: Pieces,
    alone: bool = False,
    unread: Collection[str] = (),
    more: Choose = lambda stored: {},
) -> Collection[str]:
    """Fills the tensors of ``pieces``; all ranks call it, or one of them ``alone``.

    ``unread``: tensors of model and optimizer that the checkpoint may hold besides. ``more``: what
    else is read, given what there is by name. Returns the names that were read.

    Raises `CheckpointError` on every rank before anything is overwritten, and `HalfLoaded` where
    the files change or cannot be read any more after that.
    """
    alone = alone or not dist.is_initialized()
    source, metadata = together(lambda: _opened(folder), alone)
    stored = metadata.state_dict_metadata
    wanted = {**pieces, **more(stored)}
    together(lambda: _check_same(source, metadata, wanted, unread), alone)
    needed = together(lambda: _files(metadata, wanted), alone)
    mine = needed if alone else _share(needed)
    together(lambda: check_digests(source, read_manifest(source, "torch"), mine), alone)
    together(lambda: _read_pieces(source, wanted, alone), alone)
    return wanted.keys()


def _opened(folder: str | Path) -> tuple[Path, Metadata]:
    """A checkpoint whose files are all there, and its index, which is as it was written."""
    source = find(folder)
    manifest = read_manifest(source, "torch")
    check_names(source, manifest)
    check_digests(source, manifest, [METADATA])
    try:
        return source, FileSystemReader(source).read_metadata()
    except Exception as error:  # a pickle of another version of torch may raise anything
        raise CheckpointError(
            f"{source / METADATA} cannot be read by torch {torch.__version__} "
            f"({type(error).__name__}: {error}); load it with the torch that wrote it"
        ) from error


def _check_same(source: Path, metadata: Metadata, pieces: Pieces, unread: Collection[str]) -> None:
    """Raises `CheckpointError` unless names, shapes and dtypes are those of ``pieces``."""
    stored = metadata.state_dict_metadata
    missing = [name for name in pieces if name not in stored]
    extra = [n for n in stored if n not in pieces and n not in unread and _of_training(n)]
    for names, what in ((missing, "has no"), (extra, "has, and the model has not,")):
        if names:
            more = " ..." if len(names) > 3 else ""
            state = all(name.startswith("optimizer.") for name in names)
            raise CheckpointError(
                f"{source} {what} {', '.join(names[:3])}{more} ({len(names)} of "
                f"{len(pieces if names is missing else stored)} tensors): it was written "
                f"{'with another optimizer' if state else 'for another model'}; give a checkpoint "
                f"of this {'optimizer' if state else 'model'}"
            )
    for name, piece in pieces.items():
        there = stored[name]
        if not isinstance(there, TensorStorageMetadata):
            raise CheckpointError(f"{name} in {source} is no tensor; give another checkpoint")
        for what, was, now in (
            ("shape", list(there.size), list(piece.shape)),
            ("dtype", there.properties.dtype, piece.tensor.dtype),
        ):
            if was != now:
                raise CheckpointError(
                    f"{name} has {what} {was} in {source} and {now} in the model: the checkpoint "
                    "was written for another model; give one of this model"
                )


def _of_training(name: str) -> bool:
    return name.startswith(("model.", "optimizer."))


def _files(metadata: Metadata, pieces: Pieces) -> list[str]:
    """The files that hold what this rank reads. Raises `CheckpointError`."""
    items = read_items(metadata, pieces)
    return sorted({metadata.storage_data[i.storage_index].relative_path for i in items})


def _share(needed: list[str]) -> list[str]:
    """Which files this rank checks: ranks of one machine share those that any of them reads."""
    own = (socket.gethostname(), needed)
    every = [own] * dist.get_world_size()
    dist.all_gather_object(every, own)
    here = [rank for rank, (host, _) in enumerate(every) if host == own[0]]
    names = sorted({name for rank in here for name in every[rank][1]})
    return names[here.index(dist.get_rank()) :: len(here)]


def _read_pieces(source: Path, pieces: Pieces, alone: bool) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is so
            load(
                {name: piece.tensor for name, piece in pieces.items()},
                storage_reader=FileSystemReader(source),
                planner=Loader(pieces),
                no_dist=alone,
            )
    except BROKEN as error:
        raise HalfLoaded(
            f"{source} could be checked and then not be read ({_cause(error)}): what was to be "
            "loaded into is half overwritten. Load again, or start anew"
        ) from error


def contents(source: Path) -> dict[str, tuple[int, ...]]:
    """Global shape of every tensor in the checkpoint, by name. Raises `CheckpointError`."""
    stored = _opened(source)[1].state_dict_metadata
    return {n: tuple(s.size) for n, s in stored.items() if isinstance(s, TensorStorageMetadata)}


def load_plain(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Loads a checkpoint of any plan into the original model on one device; returns its step.

    ``optimizer`` is an AdamW or SGD over ``model``'s parameters. Tied parameters may be stored
    under any of their names. Raises `CheckpointError`.
    """
    stored = contents(Path(folder))
    pieces: dict[str, Piece] = {}
    for name, tensor in _stored_under(model, stored).items():
        pieces[f"model.{name}"] = Piece.whole(tensor.detach())
        if optimizer is not None and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            for state, value in optimizer_state(optimizer, tensor).items():
                pieces[f"optimizer.{state}.{name}"] = Piece.whole(value)
    step = torch.zeros((), dtype=torch.int64)
    pieces["step"] = Piece.whole(step)
    # a tied parameter under its other names, and the state of an optimizer that is not given
    names = {f"model.{name}" for name, _ in named_tensors(model)}
    aliases = {n for n in stored if n in names or n.partition(".")[0] == "optimizer"}
    read(folder, pieces, alone=True, unread=aliases)
    if optimizer is not None:
        set_steps(optimizer, int(step))
    return int(step)


def _stored_under(model: nn.Module, stored: Iterable[str]) -> dict[str, torch.Tensor]:
    known = set(stored)
    by_id: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_tensors(model):
        if id(tensor) not in by_id or f"model.{name}" in known:
            by_id[id(tensor)] = (name, tensor)
    return {n: t for n, t in by_id.values() if isinstance(t, nn.Parameter) or f"model.{n}" in known}
