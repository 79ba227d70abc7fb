"""An error inside a job: told in one line with its place, its traceback in a file.

A process writes `report`; whoever started it turns that into what the user reads.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from autopar.files import plan_folder
from autopar.nouns.errors import UserError
from autopar.runtime.jobs.causes import remedy
from autopar.runtime.shared.error_places import LONGEST, place


class RankFailed(UserError):
    """A process of the job stopped; the text is its own error, and the others stopped with it."""


def report(error: BaseException, rank: int, where: str, folder: str) -> dict[str, Any]:
    """What a process says of the error that it stops with, as JSON-like values.

    where:  ``in step 3``.
    folder: the plan that was being run.
    """
    return {
        "time": time.time(),
        "rank": rank,
        "where": where,
        "folder": folder,
        "error": type(error).__name__,
        "message": str(error),
        "place": place(error),
        "user": isinstance(error, UserError),
        "exit_code": getattr(error, "exit_code", 1),
        "traceback": "".join(traceback.format_exception(error)),
    }


def failure(record: Mapping[str, Any], who: str) -> UserError:
    """The error of a report. ``who`` failed: ``rank 1 of 4``.

    A user's error is raised again as it was; of any other the traceback goes to the plan folder.
    """
    if record["user"]:

        class Raised(UserError):
            exit_code: ClassVar[int] = record["exit_code"]

        Raised.__name__ = record["error"]
        return Raised(record["message"])
    at = f" at {record['place']}" if record["place"] else ""
    message = " ".join(record["message"].split())
    message = message if len(message) <= LONGEST else message[:LONGEST] + " ..."
    head = f"{who} failed {record['where']}{at}: {record['error']}: {message}"
    file = Path(record["folder"]) / plan_folder.FAILURE
    try:
        file.write_text(record["traceback"])
    except OSError as error:
        return RankFailed(
            f"{head}\n{file} cannot be written ({error.strerror}), so here it is:\n"
            f"{record['traceback'].rstrip()}"
        )
    advice = remedy(record["error"], record["message"])
    more = f". {advice}" if advice else ""
    return RankFailed(f"{head}{more}. The whole traceback is in {file}")
