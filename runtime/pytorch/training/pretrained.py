"""The model's weights in files, as ``from_pretrained`` and ``save_pretrained`` have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autopar.frontends.pytorch.build import build_model
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.pipeline.stages import Stages
from autopar.runtime.pytorch.saved_names import parts_of
from autopar.runtime.pytorch.training.state import State
from autopar.runtime.pytorch.weights import aliases_of, load_weights, save_weights


def load_pretrained(folder: str | Path, state: State, workload: Workload) -> None:
    """See `Trainer.load_weights`."""
    pieces, buffers = state.weights()
    model = build_model(workload)
    load_weights(folder, pieces, aliases_of(model), frozenset(buffers), parts_of(model))
    if isinstance(state.storage, Stages):
        state.storage.copy_twins()


def save_pretrained(folder: str | Path, state: State, workload: Workload, config: Any) -> None:
    """See `Trainer.save_weights`."""
    parts = parts_of(build_model(workload))
    save_weights(folder, state.weights()[0], parts=parts)
    if config is not None and state.ranks.rank == 0:
        config.save_pretrained(folder)
