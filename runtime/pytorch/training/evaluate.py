"""The loss of a batch without a trace: no gradients, no dropout, nothing that a step could see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autopar.nouns.axes import PIPELINE
from autopar.runtime.pytorch.dropout import stream
from autopar.runtime.pytorch.pipeline.stages import Stages
from autopar.runtime.pytorch.portions import CutBatch
from autopar.runtime.pytorch.storage import Storage
from autopar.runtime.pytorch.training.totals import all_reduce_async, total_counts


def loss_of(state: Storage | Stages, batch: CutBatch) -> torch.Tensor:
    """The loss of all samples of all ranks, the same on each; a collective call.

    The program's dropout is off and its batch norms take their running statistics. What else a
    forward of the model does in training alone was planned as it is in training.
    """
    ranks = state.ranks
    state.limit()
    with draws_given_back(ranks.device), state.evaluating():
        counts = total_counts(state, batch.microbatches)
        if isinstance(state, Stages):
            share = state.evaluate(batch.microbatches, counts)
            return all_reduce_async(share, ranks, PIPELINE, *ranks.batch_axes).wait()
        shares = [state.evaluate(microbatch, counts) for microbatch in batch.microbatches]
        return all_reduce_async(torch.stack(shares).sum(), ranks, *ranks.batch_axes).wait()


@contextmanager
def draws_given_back(device: torch.device) -> Iterator[None]:
    """Random numbers that are drawn inside leave no trace."""
    streams = {id(s): s for s in (torch.default_generator, stream(device))}
    before = {key: s.get_state() for key, s in streams.items()}
    try:
        yield
    finally:
        for key, generator in streams.items():
            generator.set_state(before[key])
