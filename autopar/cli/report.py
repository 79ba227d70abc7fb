"""``autopar report``: a plan's folder as one HTML file."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from autopar.files import plan_folder, whole_file
from autopar.nouns.errors import UserError
from autopar.report.page.page import render
from autopar.report.page.shown import shown
from autopar.report.revisit import open_folder
from autopar.runtime.jobs.result import RunResult


def write_report(folder: Path, output: Path, run: Path | None) -> int:
    """Writes ``output``, and says how many bytes it has. Raises `UserError`."""
    if output.is_dir():
        raise UserError(f"-o {output} is a folder; give a file, as in -o {output}/report.html")
    if not output.absolute().parent.is_dir():
        raise UserError(
            f"-o {output}: there is no folder {output.absolute().parent}; make it first"
        )
    measured = None if run is None else read_run(run)
    page = render(shown(open_folder(folder), plan_folder.read_collectives(folder), measured))
    whole_file.write(output, page)
    return len(page.encode())


def read_run(file: Path) -> RunResult:
    """What ``autopar run --json`` printed. Raises `UserError`."""
    again = f"write it with `autopar run PLAN --steps 20 --json > {file}`"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        known = {field.name for field in fields(RunResult)}
        result = RunResult(**{name: value for name, value in data.items() if name in known})
        if not result.losses:
            raise ValueError("no steps")
    except OSError as error:
        raise UserError(f"--run {file}: {error.strerror}; {again}") from None
    except (ValueError, TypeError, AttributeError):
        raise UserError(f"--run {file} is not what a run prints; {again}") from None
    return result
