"""Jobs of several JAX processes, each with some of the devices; of one process alone, too.

Every process calls the same, as `jax.distributed` asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from autopar.files import plan_folder
from autopar.files.whole_folder import same_files
from autopar.nouns.errors import UserError
from autopar.runtime.jax.parallel import put
from autopar.runtime.jax.parallel.placing import is_key

Made = TypeVar("Made")


class ProcessFailed(UserError):
    """Another process of the job failed at what all of them do."""


def texts(own: str) -> list[str]:
    """What each process says, by its number; a collective call."""
    if jax.process_count() == 1:
        return [own]
    data = np.frombuffer(own.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([data.size], np.int32)).ravel()
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:n].astype(np.uint8).tobytes().decode() for row, n in zip(rows, sizes, strict=True)]


def together(do: Callable[[], Made]) -> Made:
    """``do()``, behind which all processes have done it. A collective call; raises on all what one
    of them raised."""
    failed: Exception | None = None
    try:
        made = do()
    except Exception as error:  # the others must not wait for this process
        failed = error
    every = texts("" if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    at = next((i for i, text in enumerate(every) if text), None)
    if at is not None:
        raise ProcessFailed(f"process {at} failed: {every[at]}")
    return made


def owned(tree: Any, shardings: Any) -> Any:
    """`put`, of which nothing shares memory with ``tree``: what a step donates is written over,
    and the arrays stay the caller's. Only what `put` did not copy is copied."""

    def own(made: Any, given: Any) -> Any:
        return _copy(made) if _share_memory(made, given) else made

    return jax.tree.map(own, put(tree, shardings), tree)


def _copy(array: Any) -> Any:
    return jax.jit(jnp.copy, out_shardings=array.sharding)(array)


def _share_memory(made: Any, given: Any) -> bool:
    """Whether a buffer of ``made`` lies in one of ``given``, an array of jax or of numpy."""
    ours, theirs = _buffers(made), _buffers(given)
    return any(start <= at < end for at, _ in ours for start, end in theirs)


def _buffers(array: Any) -> list[tuple[int, int]]:
    """First and last address of what this process holds of an array."""
    if is_key(array):
        array = jax.random.key_data(array)
    if not isinstance(array, jax.Array):
        whole = np.asarray(array)
        return [np.lib.array_utils.byte_bounds(whole)] if whole.size else []
    pieces = [shard.data for shard in array.addressable_shards]
    starts = [piece.unsafe_buffer_pointer() for piece in pieces if piece.size]
    return [(at, at + piece.nbytes) for at, piece in zip(starts, pieces, strict=False)]


def make_and_share(make: Callable[[], Mapping[str, str]], folder: Path) -> None:
    """See `autopar.runtime.first_rank`; a collective call."""
    import json

    first = jax.process_index() == 0
    files = together(lambda: dict(make()) if first else {})
    given: dict[str, str] = json.loads(texts(json.dumps(files))[0])

    def copied() -> None:
        if not first and not same_files(folder, given):
            plan_folder.write(folder, given)

    together(copied)
