"""Published runs read with nothing declared of their source, as rows that nobody has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.published_declarations import Knowledge, Row, rules_of_one_source
from benchmarks.published_fit import Fit, source_of
from benchmarks.published_rows import Run, Unpriceable, read_run

Array = NDArray[np.float64]
# What is forgotten of a source: its declarations; its title and place as well; and the rules that
# only its rows meet, which may have been written with them in view.
FORGETTING: dict[str, Knowledge] = {"undeclared": "named", "untitled": "bare", "unseen": "bare"}


def forget(fit: Fit, rows: Mapping[str, Row], label: str, constants: Mapping[str, Array]) -> Array:
    """Step seconds of every run by constants fitted without its source, as if no one had declared
    anything of it; batches that are read otherwise are scaled to the same tokens. NaN where the
    row cannot be priced without."""
    again = dict(reread(fit.runs, rows, label))
    other = Fit([again.get(run.id, run) for run in fit.runs])
    seconds = other.predict_left_out(source_of, constants)
    scale = [
        _token_share(run) / _token_share(one) for run, one in zip(fit.runs, other.runs, strict=True)
    ]
    known = np.array([run.id in again for run in fit.runs], bool)
    return np.where(known, seconds / np.array(scale), np.nan)


def _token_share(run: Run) -> float:
    """Devices over the tokens of a step: what turns step seconds into seconds of a token."""
    return run.layout.device_count / (run.layout.global_batch * run.arch.seq)


def reread(runs: Sequence[Run], rows: Mapping[str, Row], label: str) -> list[tuple[str, Run]]:
    """(id, run) of the runs that can be read with the knowledge that `label` leaves."""
    alone = rules_of_one_source(rows.values()) if label == "unseen" else {}
    pairs = []
    for run in runs:
        without = alone.get(run.source, frozenset())
        try:
            pairs.append((run.id, read_run(rows[run.id], FORGETTING[label], without)))
        except Unpriceable:
            continue
    return pairs


def forgotten_memory(runs: Sequence[Run], rows: Mapping[str, Row], label: str) -> list[Run]:
    """The runs as they are read without declarations, each still its own configuration."""
    keys = {run.id: run.key for run in runs}
    measured = [run for run in runs if run.memory_bytes]
    return [replace(run, key=keys[name]) for name, run in reread(measured, rows, label)]
