"""The global batch of a run beside the one that was planned for, in either framework."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from autopar.nouns.batch import BatchEntry
from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload


def batch_of(workload: Workload, step: int) -> Any:
    """The global batch of a step: ``batch(step)`` where it takes the number, else ``batch()``."""
    taken = inspect.signature(workload.batch).parameters.values()
    numbered = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in taken)
    return workload.batch(step) if numbered else workload.batch()


class OtherBatch(UserError):
    """A global batch that is not what was planned for."""


def check_batch(batch: Any) -> None:
    """Raises `OtherBatch` unless ``batch`` is one at all."""
    if not isinstance(batch, Mapping):
        raise OtherBatch(
            f"a batch is a mapping of names to tensors, and this is a {type(batch).__name__}: of a "
            "data set or a loader give one batch after the other"
        )


def check_planned(batch: Mapping[str, Any], planned: Iterable[BatchEntry]) -> None:
    """Raises `OtherBatch` unless ``batch`` has the entries of ``planned`` in shape and dtype.

    Predictions, local shapes and the cut into microbatches hold for these alone.
    """
    wanted = {entry.name: f"{entry.dtype} {list(entry.shape)}" for entry in planned}
    given = {name: _shown(value) for name, value in batch.items()}
    for name in (*wanted, *given):
        if given.get(name) != wanted.get(name):
            raise OtherBatch(
                f"batch[{name!r}] is {given.get(name, 'missing')}; where the plan was made it is "
                f"{wanted.get(name, 'missing')}: give the global batch that was planned for, or "
                "plan again for this one"
            )


def is_planned(batch: Mapping[str, Any], planned: Iterable[BatchEntry]) -> bool:
    """Whether `check_planned` lets ``batch`` pass."""
    try:
        check_planned(batch, planned)
    except OtherBatch:
        return False
    return True


def _shown(value: Any) -> str:
    """``int64 [8, 16]``"""
    if not hasattr(value, "shape"):
        return f"of type {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
