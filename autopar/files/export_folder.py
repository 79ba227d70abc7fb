"""The folder that ``autopar export`` writes: files of the target, and ``autopar.json``, which has
the digest of each. A folder with anything else, or with files that were edited since, is never
replaced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from autopar.files import whole_folder
from autopar.nouns.errors import UserError

RECORD = "autopar.json"


class ExportFolderError(UserError):
    """A folder that an export would spoil."""


def write(folder: str | Path, files: Mapping[str, str], target: str) -> None:
    """Replaces ``folder``. Raises `ExportFolderError`, `whole_folder.NotWritten`."""
    check_writable(folder)
    digests = {name: whole_folder.digest(text.encode()) for name, text in files.items()}
    record = json.dumps({"target": target, "files": digests}, indent=1) + "\n"
    whole_folder.replace(folder, {**files, RECORD: record})


def check_writable(folder: str | Path) -> None:
    """Raises `ExportFolderError` where ``folder`` is a file or holds what no export wrote."""
    place = Path(folder)
    if not whole_folder.check_place(place, ExportFolderError):
        return
    digests = _digests(place)
    there = sorted(f for f in place.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    names = [file.relative_to(place).as_posix() for file in there]
    foreign = [name for name in names if name not in digests and name != RECORD]
    if foreign:
        raise ExportFolderError(
            f"{place} holds what no export wrote: {', '.join(foreign[:3])}; give -o another "
            "folder, or move it"
        )
    edited = [
        name
        for name, file in zip(names, there, strict=True)
        if name in digests and whole_folder.digest(file.read_bytes()) != digests[name]
    ]
    if edited:
        raise ExportFolderError(
            f"{place / edited[0]} was edited since it was exported and would be lost; give -o "
            "another folder, or move it"
        )


def _digests(folder: Path) -> dict[str, str]:
    """File -> digest as the record has them; empty where there is none."""
    try:
        return dict(json.loads((folder / RECORD).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
