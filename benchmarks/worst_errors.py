"""Plans verified many at a time: the largest relative error of each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from autopar.nouns.errors import UserError
from autopar.runtime.jobs.launch import AT_ONCE, verify_many
from autopar.runtime.verify.verified import VerifyResult


def worst_errors(folders: Sequence[str]) -> dict[str, float]:
    """By folder; 1 where a plan moved other bytes than priced or could not be run, which is
    printed."""
    errors: dict[str, float] = {}
    for start in range(0, len(folders), AT_ONCE):
        part = folders[start : start + AT_ONCE]
        errors |= _together(part)
        print(f"verified {start + len(part)} of {len(folders)} plans", file=sys.stderr, flush=True)
    return errors


def _together(folders: Sequence[str]) -> dict[str, float]:
    """Plans are verified one by one where together fails."""
    try:
        results = verify_many(list(folders))
    except UserError as error:
        if len(folders) == 1:
            print(f"{folders[0]}: {short(error)}", file=sys.stderr, flush=True)
            return {folders[0]: 1.0}
        return {name: value for folder in folders for name, value in _together([folder]).items()}
    return {folder: _worst(result) for folder, result in zip(folders, results, strict=True)}


def _worst(result: VerifyResult) -> float:
    exact = result.exact
    return float(exact.largest) if result.collectives_match else 1.0


def short(error: BaseException) -> str:
    """Class and first line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
