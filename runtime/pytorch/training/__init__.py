"""Everything that the ``train.py`` of emitted programs imports."""

from __future__ import annotations

from autopar.runtime.pytorch.batches import Batch, check_alike, cut_batch, global_batch
from autopar.runtime.pytorch.gradients import clip, reduce_late
from autopar.runtime.pytorch.initialize import initialize, seed_draws
from autopar.runtime.pytorch.offload import step_from_host
from autopar.runtime.pytorch.optimizer import make_optimizer
from autopar.runtime.pytorch.parameters import running
from autopar.runtime.pytorch.pipeline.stages import Stages
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.replicated import Replicated
from autopar.runtime.pytorch.sharded import Sharded
from autopar.runtime.pytorch.storage import Storage
from autopar.runtime.pytorch.training.load import rank_of_job, read
from autopar.runtime.pytorch.training.program import Program
from autopar.runtime.pytorch.training.totals import all_reduce_async, total_counts

__all__ = [
    "Batch", "Program", "Ranks", "Replicated", "Sharded", "Stages", "Storage", "all_reduce_async",
    "check_alike", "clip", "cut_batch", "global_batch", "initialize", "make_optimizer",
    "rank_of_job", "read", "reduce_late", "running", "seed_draws", "step_from_host",
    "total_counts",
]  # fmt: skip
