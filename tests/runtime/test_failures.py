"""What is told of an error inside a job, without a job."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from autopar.nouns.errors import DoesNotFit
from autopar.runtime.jobs import pytorch_launch
from autopar.runtime.jobs.causes import killed_by
from autopar.runtime.jobs.failures import RankFailed, failure, report
from autopar.runtime.shared.error_places import LONGEST, place


def raised_error(raised: Exception) -> Exception:
    try:
        raise raised
    except Exception as error:
        return error


def test_the_place_is_the_innermost_line_of_the_users_files() -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, code in enumerate(lines, 1) if code.endswith("standard library"))
    with pytest.raises(OSError, match="nothing") as caught:
        Path("/nothing/there").read_text()  # goes on in the standard library
    assert place(caught.value).startswith(f"{__file__}:{line} in test_the_place")


def test_without_a_line_of_the_users_there_is_no_place() -> None:
    assert place(ValueError("never raised")) == ""


def test_one_line_and_a_file(tmp_path: Path) -> None:
    error = raised_error(ValueError("two\n  lines"))
    raised = failure(report(error, 3, "in step 7", str(tmp_path)), "rank 3 of 4")
    assert isinstance(raised, RankFailed)
    assert str(raised) == (
        f"rank 3 of 4 failed in step 7 at {place(error)}: ValueError: two lines. "
        f"The whole traceback is in {tmp_path / 'failure.log'}"
    )
    assert "raise raised" in (tmp_path / "failure.log").read_text()


def test_a_long_message_is_cut(tmp_path: Path) -> None:
    written = report(raised_error(ValueError("x" * 10_000)), 0, "in step 0", str(tmp_path))
    assert len(str(failure(written, "rank 0"))) < LONGEST + 600
    assert "x" * 10_000 in (tmp_path / "failure.log").read_text()


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    written = report(raised_error(ValueError("said")), 0, "in step 0", str(tmp_path / "gone"))
    text = str(failure(written, "rank 0"))
    assert "cannot be written" in text
    assert "raise raised" in text


def test_a_users_error_is_raised_as_it_was(tmp_path: Path) -> None:
    error = failure(
        report(raised_error(DoesNotFit("too big")), 0, "in step 0", str(tmp_path)), "rank 0"
    )
    assert (type(error).__name__, str(error), error.exit_code) == ("DoesNotFit", "too big", 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes."),
    ],
)
def test_what_runs_out_of_memory_is_told_how_to_take_less(tmp_path: Path, error: Exception) -> None:
    told = str(failure(report(raised_error(error), 1, "in step 0", str(tmp_path)), "rank 1 of 2"))
    assert re.search(r"rank 1 of 2 failed in step 0 .*more memory than there is: .*zero=3", told)


def codes_of(tmp_path: Path, *codes: int) -> str:
    file = tmp_path / "codes.json"
    file.write_text(json.dumps(codes))
    return str(pytorch_launch._failure(1, file, tmp_path, len(codes)))


def test_a_signal_is_named_with_its_rank_and_what_to_do(tmp_path: Path) -> None:
    ends = -signal.SIGTERM
    told = codes_of(tmp_path, ends, -signal.SIGKILL, ends)
    assert re.match(r"rank 1 of 3 was killed by SIGKILL \(out of memory\? .*zero=3", told)
    assert told.endswith("; the other ranks were stopped")
    assert "PYTHONFAULTHANDLER" in codes_of(tmp_path, -signal.SIGSEGV, ends)
    told = codes_of(tmp_path, ends, 0, ends)
    assert re.match(r"ranks 0, 2 of 3 ended by SIGTERM \(from outside: .*--resume", told)
    assert killed_by(-40) == "signal 40"
    told = str(pytorch_launch._failure(-9, tmp_path / "none", tmp_path, 3))
    assert told.startswith(
        "the process that starts the ranks was killed by SIGKILL (out of memory?"
    )
