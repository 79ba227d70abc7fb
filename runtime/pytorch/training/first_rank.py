"""`autopar.runtime.first_rank` over a process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar.files import plan_folder
from autopar.files.whole_folder import same_files
from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.agreement import together
from autopar.runtime.pytorch.training.load import start

PATIENCE = timedelta(days=1)
"""How long the others wait for the first rank: a search may take longer than any collective."""


class FirstRankFailed(UserError):
    """The first rank ended with an error that is not the user's, and shows it itself."""


def make_and_share(make: Callable[[], Mapping[str, str]], folder: Path) -> None:
    """See `autopar.runtime.first_rank`; a collective call. Joins the process group if need be."""
    start()
    group: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
    answer: list[Any] = [None]
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = dict(make())
        except UserError as error:
            failed, answer[0] = error, error
        except Exception as error:  # a defect: the others must not wait for it
            failed = error
            answer[0] = FirstRankFailed(f"rank 0 failed: {type(error).__name__}: {error}")
    dist.broadcast_object_list(answer, src=0, group=group)
    if failed is not None:
        raise failed
    if isinstance(answer[0], Exception):
        raise answer[0]
    together(lambda: _copied(answer[0], folder))
    dist.destroy_process_group(group)


def _copied(files: Mapping[str, str], folder: Path) -> None:
    """Writes what is not there, by one process of a machine."""
    first_here = int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0
    if first_here and not same_files(folder, files):
        plan_folder.write(folder, files)
