"""Lists of actions that a person or another program wrote, as a schedule.

A file has one line a pipeline rank, ``0F0 0F1 0B0 0B1``. Stages are numbered along the model; which
rank a stage lives on is the line that its actions stand in.
"""

from __future__ import annotations

from pathlib import Path

from autopar.pipeline.actions import Lists, Schedule, ScheduleError, from_text, one_route
from autopar.pipeline.check import check


def read_schedule(path: str | Path) -> Schedule:
    """The schedule in a file, proven. Raises `ScheduleError`, `Deadlock`; both name the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"schedule={path} cannot be read: {error}") from None
    try:
        return written(Path(path).name, from_text(text))
    except ScheduleError as error:
        raise type(error)(f"schedule={path}: {error}") from None


def written(name: str, lists: Lists, slices: int = 1) -> Schedule:
    """``lists`` as a schedule in which every microbatch passes all stages in order; ``slices``: so
    many in a row are of the same sequences.

    Raises:
        ScheduleError: they are none; says which action is too many, is missing, or where it is.
        Deadlock: they cannot run; names the circle.
    """
    where: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            if where.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {action.stage} stands in line {where[action.stage] + 1} and, with "
                    f"{action}, in line {rank + 1}: a stage lives on one rank"
                )
    if not where:
        raise ScheduleError("it has no actions: write one line a rank, such as 0F0 0F1 0B0 0B1")
    missing = sorted({*range(max(where) + 1)} - where.keys())
    if missing:
        raise ScheduleError(
            f"it has stage {max(where)} and nothing of stage {missing[0]}: stages are numbered "
            "from 0, along the model"
        )
    ranks = tuple(where[stage] for stage in range(len(where)))
    microbatches = 1 + max(action.microbatch for actions in lists for action in actions)
    made = one_route(name, ranks, lists, microbatches, slices)
    check(made)
    return made
