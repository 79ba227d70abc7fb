"""The global batch that a model was captured with; ``batch.json`` is its text form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Kind = Literal["data", "key", "drawn", "count"]
NO_SAMPLES = (
    "the batch has no samples: dim 0 of what it holds is 0. Give a batch as it is trained on; its "
    "sizes decide the plan, and its values nothing"
)

NO_DIM = (
    "no entry of the batch has a dim 0 that counts samples, so there is nothing to split over data "
    "ranks. Where the batch is one whole (a graph, a field), give each entry a dim of one sample, "
    "x[None], and take x[0] in the model: model axes then split the layers (--fix tp=N); "
    "several of them in one batch are split over data ranks too"
)


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One tensor of the global batch. ``batch_dim`` is None where every device gets it whole.

    kind: ``key``, random keys, which a program does not read itself; ``drawn``, random numbers that
          follow from them, and ``count``, a number that other entries have as a whole, which the
          user does not give; all else is ``data``.
    numbers: those that every sample has here, where the forward asks for them and the program is
          that of such batches alone; of an entry without samples, its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None
    kind: Kind = field(default="data", repr=False)
    numbers: tuple[int, ...] = field(default=(), repr=False)

    @property
    def given(self) -> bool:
        """Whether it is in the batches of the user."""
        return self.kind in ("data", "key")


def tokens_of(entries: Iterable[BatchEntry]) -> int | None:
    """Elements of the first batch entry of integer ids with a sequence dim."""
    for entry in entries:
        if "int" in entry.dtype and len(entry.shape) == 2 and entry.batch_dim == 0:
            return entry.shape[0] * entry.shape[1]
    return None


def sample_dims(entries: Iterable[BatchEntry]) -> dict[str, int]:
    """The dim that counts samples, of the entries that have them."""
    return {e.name: e.batch_dim for e in entries if e.batch_dim is not None}


def to_json(batch: Iterable[BatchEntry]) -> str:
    """``batch.json``."""
    rows = {
        e.name: {"shape": e.shape, "dtype": e.dtype, "batch_dim": e.batch_dim}
        | ({} if e.kind == "data" else {"kind": e.kind})
        | ({"numbers": e.numbers} if e.numbers else {})
        for e in batch
    }
    return json.dumps(rows, indent=1) + "\n"


def from_json(text: str) -> tuple[BatchEntry, ...]:
    """The inverse of `to_json`; raises ValueError for text that is no batch."""
    rows: Mapping[str, Any] = json.loads(text)
    if not isinstance(rows, dict) or not rows:
        raise ValueError("no batch")
    return tuple(_entry(name, row) for name, row in rows.items())


def _entry(name: str, row: Any) -> BatchEntry:
    match row:
        case {"shape": [*shape], "dtype": str(dtype), "batch_dim": int() | None as dim} if all(
            isinstance(n, int) and n > 0 for n in shape
        ):
            kind, numbers = row.get("kind", "data"), row.get("numbers", [])
            whole = isinstance(numbers, list) and all(isinstance(n, int) for n in numbers)
            if (dim is None or 0 <= dim < len(shape)) and kind in get_args(Kind) and whole:
                return BatchEntry(name, tuple(shape), dtype, dim, kind, tuple(numbers))
    raise ValueError(f"{name} is {row}: it needs a shape, a dtype and a batch_dim within the shape")
