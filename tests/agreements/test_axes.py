"""Axes of a mesh are called by the names of `autopar.nouns.axes`, as constants."""

from __future__ import annotations

from autopar.nouns.axes import AXES, BATCH, SAMPLES, SEQUENCES, SHARD, SHARING
from autopar.runtime.jax.parallel import tables
from tests.agreements.test_imports import ROOT, read, sources

MAY_SPELL = {
    "autopar/nouns/": "where the names are from",
    "autopar/files/imports/deepspeed.py": "a section of DeepSpeed's settings",
    "runtime/jax/parallel/tables.py": "programs carry it, who have no autopar",
}


def test_names_of_axes_are_constants() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {text!r}"
        for _, file in sources()
        if not str(file.relative_to(ROOT)).startswith(tuple(MAY_SPELL))
        for text, line in read(file).texts
        if text in AXES
    ]
    assert not wrong, "\n".join(wrong)


def test_what_programs_carry_has_the_same_names() -> None:
    assert (tables.SHARD, tables.SAMPLE_AXES) == (SHARD, SAMPLES)
    assert (tables.SEQUENCE_AXES, tables.DATA_AXES) == (SEQUENCES, BATCH)
    assert tables.SHARING == SHARING
