"""What all ranks do together: each of them does it, or all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from autopar.nouns.errors import UserError

Done = TypeVar("Done")


def of_first(value: Done) -> Done:
    """What the first rank has; a collective call."""
    held = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(held, src=0)
    return held[0]


def together(
    do: Callable[[], Done], alone: bool = False, group: dist.ProcessGroup | None = None
) -> Done:
    """What ``do`` gives on this rank; ``group`` is all ranks again, where that is not the default.

    A `UserError` on any rank is raised on every one, that of the first such rank. A collective
    call, unless ``alone``: a rank that raised before the others would leave them waiting.
    """
    if alone or not dist.is_initialized() or dist.get_world_size() == 1:
        return do()
    done: Done | None = None
    own: tuple[type[UserError], str] | None = None
    try:
        done = do()
    except UserError as error:
        own = (type(error), str(error))
    every: list[tuple[type[UserError], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own, group=group)
    failed = [(rank, message) for rank, message in enumerate(every) if message is not None]
    if failed:
        rank, (kind, text) = failed[0]
        raise kind(text if rank == 0 and len(failed) > 1 else f"rank {rank}: {text}")
    return done  # type: ignore[return-value]
