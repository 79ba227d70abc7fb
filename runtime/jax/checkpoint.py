"""Checkpoints of JAX training: every array whole and by its full name, in one file of NumPy."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.runtime.checkpoint_folder import (
    CheckpointError,
    check_digests,
    check_names,
    file_of,
    find,
    read_manifest,
)
from autopar.runtime.save_target import Saving, not_written

STATE = "state.npz"
_DTYPES = "dtypes.json"
"""By name: NumPy's files know no bfloat16."""


def write(folder: str | Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Writes ``folder`` whole or not at all; replaces an older checkpoint.

    Raises `CheckpointError` where it cannot be written, or holds something else.
    """
    saving = Saving.of(folder, "jax")
    try:
        dtypes = json.dumps({name: str(array.dtype) for name, array in arrays.items()})
        try:
            with (saving.new / STATE).open("wb") as file:
                everything: dict[str, Any] = {_DTYPES: np.array(dtypes), **arrays}
                np.savez(file, **everything)
            files = {STATE: file_of(saving.new / STATE)}
        except OSError as error:
            raise not_written(saving.target, error) from error
        saving.finish(files)
    finally:
        saving.release()


def read(folder: str | Path, wanted: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a checkpoint, which have names, shapes and dtypes of ``wanted``.

    Raises `CheckpointError`.
    """
    source = find(folder)
    manifest = read_manifest(source, "jax")
    check_names(source, manifest)
    check_digests(source, manifest, list(manifest.files))
    try:
        with np.load(source / STATE) as stored:
            dtypes = json.loads(str(stored[_DTYPES]))
            _check_same(source, dtypes, wanted)
            arrays = {n: stored[n].view(jnp.dtype(dtypes[n])) for n in wanted}
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{source / STATE} cannot be read ({type(error).__name__}: {error}); give another "
            "checkpoint"
        ) from None
    for name, array in arrays.items():
        if array.shape != wanted[name].shape:
            raise CheckpointError(
                f"{name} has shape {list(array.shape)} in {source} and "
                f"{list(wanted[name].shape)} in the model: the checkpoint was written for another "
                "model; give one of this model"
            )
    return arrays


def _check_same(source: Path, dtypes: Mapping[str, str], wanted: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` unless names and dtypes are those of ``wanted``."""
    missing = [name for name in wanted if name not in dtypes]
    extra = [name for name in dtypes if name not in wanted]
    for names, what in ((missing, "has no"), (extra, "has, and the model has not,")):
        if names:
            more = " ..." if len(names) > 3 else ""
            state = not any(name.startswith("params/") or name == "step" for name in names)
            raise CheckpointError(
                f"{source} {what} {', '.join(names[:3])}{more} ({len(names)} of "
                f"{len(wanted if names is missing else dtypes)} arrays): it was written "
                f"{'with another optimizer' if state else 'for another model'}; give a checkpoint "
                f"of this {'optimizer' if state else 'model'}"
            )
    for name, dtype in dtypes.items():
        if dtype != str(wanted[name].dtype):
            raise CheckpointError(
                f"{name} has dtype {dtype} in {source} and {wanted[name].dtype} in the model: the "
                "checkpoint was written for another model; give one of this model"
            )
