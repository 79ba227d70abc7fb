"""A folder that the first rank of a job makes, and every machine of the job has afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def first_rank_makes(make: Callable[[], Mapping[str, str]], folder: Path) -> None:
    """Calls ``make`` on the first rank alone while the others wait, however long that takes.

    ``make`` writes ``folder`` and returns its files, relative path -> content.
    A machine that does not share the file system gets a copy from its own first process. In a
    process without a job it is a plain call. Raises on every rank what ``make`` raised.
    """
    if _of_several_jax_processes():
        from autopar.runtime.jax.processes import make_and_share as share_by_jax

        share_by_jax(make, folder)
        return
    if not _in_a_job():
        make()
        return
    from autopar.runtime.pytorch.training.first_rank import make_and_share

    make_and_share(make, folder)


def _of_several_jax_processes() -> bool:
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return False
    return bool(jax.process_count() > 1)


def _in_a_job() -> bool:
    """Whether torchrun started this process, or it has joined a process group itself."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        return True
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and bool(dist.is_initialized())
