"""The global batches of two plans that stand side by side: whether steps and times compare."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.nouns.batch import BatchEntry

Batch = Sequence[BatchEntry] | None
"""None where a plan's folder does not say."""
Batches = tuple[Batch, Batch]
MOST_NAMED = 3
"""Entries of a batch that are named."""


def samples_of(batch: Batch) -> int | None:
    """Samples of one step; None where nothing says."""
    sizes = [e.shape[e.batch_dim] for e in batch or () if e.batch_dim is not None]
    return sizes[0] if sizes else None


def batch_text(batch: Batch) -> str:
    """``64 samples: tokens [64, 512]``"""
    given = [e for e in batch or () if e.kind == "data"]
    named = ", ".join(f"{e.name} {list(e.shape)}" for e in given[:MOST_NAMED])
    more = ", ..." if len(given) > MOST_NAMED else ""
    samples = samples_of(batch)
    return f"{'no' if samples is None else samples} samples: {named}{more}" if given else "-"


def sample_times_s(batches: Batches, steps_s: tuple[float, float]) -> tuple[float, float] | None:
    """Seconds of a step over its samples, where two plans have batches of other sizes."""
    one, two = map(samples_of, batches)
    if one is None or two is None or one == two:
        return None
    return steps_s[0] / one, steps_s[1] / two


def not_alike(batches: Batches, names: tuple[str, str]) -> str:
    """One sentence where steps do not compare, because they are of other batches; else empty."""
    if None in batches or batch_text(batches[0]) == batch_text(batches[1]):
        return ""
    one, two = map(samples_of, batches)
    if one == two:
        return (
            f"Steps of {names[0]} and {names[1]} are of batches whose samples have other sizes, so "
            "their times and memory do not compare; plan both with one batch"
        )
    return (
        f"A step of {names[0]} has {one} samples and one of {names[1]} {two}: times by sample "
        "compare, times and memory of a step do not; plan both with one batch"
    )
