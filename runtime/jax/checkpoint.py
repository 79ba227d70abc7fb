"""Checkpoints of JAX training: the pieces of every array by full name, in files of NumPy.

Each process writes ``<its number>.state.npz``, one process alone ``state.npz``: the pieces that its
devices have, each by one device. Whoever reads them puts the whole together, so that any plan on
any number of devices and processes can go on from it.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar.runtime.jax.processes import ProcessFailed, texts, together
from autopar.runtime.shared.checkpoint_folder import (
    CheckpointError,
    Damaged,
    File,
    check_digests,
    check_names,
    file_of,
    find,
    read_manifest,
)
from autopar.runtime.shared.save_target import Saving, not_written, place_for

STATE = "state.npz"
_INDEX = "index.json"
"""What the pieces of a file are; NumPy's files know no bfloat16."""

Made = TypeVar("Made")
Whole = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an array: its first element is at ``starts``, and the whole has ``shape``."""

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    data: Whole


def pieces_of(array: Any) -> list[Piece]:
    """What this process writes of ``array``: each piece that one of its devices has first."""
    if not isinstance(array, jax.Array):
        return [Piece(array.shape, (0,) * array.ndim, array)]
    return [
        Piece(array.shape, tuple(s.start or 0 for s in shard.index), np.asarray(shard.data))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def layers_of(pieces: Iterable[Piece], layer: int) -> list[Piece]:
    """Of pieces of arrays that are stacked along dim 0, which nothing splits, those of one."""
    return [Piece(p.shape[1:], p.starts[1:], p.data[layer]) for p in pieces]


def write(folder: str | Path, arrays: Mapping[str, Whole | Sequence[Piece]]) -> None:
    """Writes ``folder`` whole or not at all; replaces an older checkpoint. All processes call,
    each with its own pieces of ``arrays``.

    Raises `CheckpointError`, on all of them, where it cannot be written, or holds something else.
    """
    count, own = jax.process_count(), jax.process_index()
    name = STATE if count == 1 else f"{own}.{STATE}"
    saving = together(lambda: Saving.of(folder, "jax") if own == 0 else None)
    try:
        new = place_for(Path(folder).absolute())
        file = together(lambda: _written(new / name, Path(folder).absolute(), arrays))
        every = [json.loads(text) for text in texts(json.dumps([name, asdict(file)]))]
        files = {str(called): File(**fields) for called, fields in every}
        together(lambda: None if saving is None else saving.finish(files))
    finally:
        if saving is not None:
            saving.release()


def _written(file: Path, target: Path, arrays: Mapping[str, Whole | Sequence[Piece]]) -> File:
    index: dict[str, dict[str, Any]] = {}
    entries: dict[str, Any] = {}
    for name, given in arrays.items():
        for piece in pieces_of(given) if isinstance(given, np.ndarray) else given:
            number = str(len(entries))
            entries[number] = piece.data
            known = index.setdefault(
                name, {"dtype": str(piece.data.dtype), "shape": piece.shape, "pieces": {}}
            )
            known["pieces"][number] = piece.starts
    try:
        with file.open("wb") as into:
            np.savez(into, **{_INDEX: np.array(json.dumps(index)), **entries})
        return file_of(file)
    except OSError as error:
        raise not_written(target, error) from error


def read(folder: str | Path, wanted: Mapping[str, Any]) -> dict[str, Whole]:
    """The arrays of a checkpoint, which have names, shapes and dtypes of ``wanted``.

    Raises `CheckpointError`, on all processes where several read, and `Damaged` on all of them
    where that is what one of them finds.
    """
    try:
        return together(lambda: _read(folder, wanted))
    except (Damaged, ProcessFailed) as error:
        every = texts(str(error) if isinstance(error, Damaged) else "")
        damage = next(filter(None, every), "")
        if damage and not isinstance(error, Damaged):
            raise Damaged(damage) from None
        raise


def _read(folder: str | Path, wanted: Mapping[str, Any]) -> dict[str, Whole]:
    source = find(folder)
    manifest = read_manifest(source, "jax")
    check_names(source, manifest)
    check_digests(source, manifest, list(manifest.files))
    indices = {name: _reading(source / name, _index_of) for name in manifest.files}
    _check_names(source, {name for index in indices.values() for name in index}, wanted)
    arrays: dict[str, Whole] = {}
    filled: Counter[str] = Counter()

    def join(stored: Any) -> None:
        for name, known in _index_of(stored).items():
            shape, dtype = tuple(known["shape"]), jnp.dtype(known["dtype"])
            _check_same(source, name, shape, dtype, wanted[name])
            whole = arrays.setdefault(name, np.empty(shape, dtype))
            for number, starts in known["pieces"].items():
                piece = stored[number].view(dtype)
                place = tuple(slice(s, s + n) for s, n in zip(starts, piece.shape, strict=True))
                whole[place] = piece
                filled[name] += piece.size

    for file in manifest.files:
        _reading(source / file, join)
    for name, array in arrays.items():
        if filled[name] != array.size:
            raise Damaged(
                f"{source} has {filled[name]} of the {array.size} elements of {name}: a process "
                "did not write its part; give another checkpoint"
            )
    return {name: arrays[name] for name in wanted}


def _index_of(stored: Any) -> dict[str, dict[str, Any]]:
    index: dict[str, dict[str, Any]] = json.loads(str(stored[_INDEX]))
    return index


def _reading(file: Path, use: Callable[[Any], Made]) -> Made:
    try:
        with np.load(file) as stored:
            return use(stored)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise Damaged(
            f"{file} cannot be read ({type(error).__name__}: {error}); give another checkpoint"
        ) from None


def _check_names(source: Path, there: Collection[str], wanted: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` unless the names are those of ``wanted``."""
    missing = [name for name in wanted if name not in there]
    extra = sorted(name for name in there if name not in wanted)
    for names, what in ((missing, "has no"), (extra, "has, and the model has not,")):
        if names:
            more = " ..." if len(names) > 3 else ""
            state = not any(name.startswith("params/") or name == "step" for name in names)
            raise CheckpointError(
                f"{source} {what} {', '.join(names[:3])}{more} ({len(names)} of "
                f"{len(wanted if names is missing else there)} arrays): it was written "
                f"{'with another optimizer' if state else 'for another model'}; give a checkpoint "
                f"of this {'optimizer' if state else 'model'}"
            )


def _check_same(source: Path, name: str, shape: tuple[int, ...], dtype: Any, wanted: Any) -> None:
    """Raises `CheckpointError` unless shape and dtype are those of ``wanted``."""
    for what, its, ours in (
        ("dtype", str(dtype), str(wanted.dtype)),
        ("shape", list(shape), list(wanted.shape)),
    ):
        if its != ours:
            raise CheckpointError(
                f"{name} has {what} {its} in {source} and {ours} in the model: the checkpoint was "
                "written for another model; give one of this model"
            )
