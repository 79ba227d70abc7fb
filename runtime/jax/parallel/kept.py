"""A state on disk: what `main` of ``train.py`` goes on from when it is started again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from autopar.runtime.jax.parallel.tables import Array, State


def save(folder: Path, state: State) -> None:
    """Writes ``folder/step-N``: every process a file of its pieces, each of which is in one file.

    All processes call, and see the same ``folder``. What is half written has no such name.
    """
    pieces: dict[str, Any] = {}
    for path, array in tree_flatten_with_path(state)[0]:
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                data = np.asarray(shard.data)
                bits = data.view(f"u{data.itemsize}") if data.dtype.kind == "V" else data
                pieces[_piece_name(path, shard.index, array.shape)] = bits
    target = folder / f"step-{int(state['step'])}"
    target.mkdir(parents=True, exist_ok=True)
    name = f"{jax.process_index()}-of-{jax.process_count()}"
    with (target / f".{name}").open("wb") as file:
        np.savez(file, **pieces)
    os.replace(target / f".{name}", target / f"{name}.npz")


def restore(folder: Path, state: State) -> State:
    """The newest state in ``folder`` that is whole, as ``state`` lies; ``state`` where none is."""
    whole = [step for step in folder.glob("step-*") if _is_whole(step)]
    if not whole:
        return state
    newest = max(whole, key=lambda step: int(step.name.removeprefix("step-")))
    files = [np.load(file) for file in newest.glob("*.npz")]
    where = {name: file for file in files for name in file.files}

    def read(path: Any, array: Array) -> Array:
        def piece(index: Sequence[slice]) -> Any:
            name = _piece_name(path, index, array.shape)
            return where[name][name].view(array.dtype)

        return jax.make_array_from_callback(array.shape, array.sharding, piece)

    restored: State = tree_map_with_path(read, state)
    return restored


def _is_whole(step: Path) -> bool:
    names = [file.stem for file in step.glob("*.npz")]
    return bool(names) and len(names) == int(names[0].rpartition("-of-")[2])


def _piece_name(path: Any, index: Sequence[slice], shape: Sequence[int]) -> str:
    """``['params']['head.weight'] 0:64,0:128``"""
    ends = (part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    place = ",".join(f"{start}:{stop}" for start, stop in ends)
    return f"{keystr(path)} {place}".replace("/", "|")
