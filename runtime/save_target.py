"""Where a checkpoint may go: said before the first step, not after the last."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import UserError

MARKS = {"torch": ".metadata", "jax": "state.npz"}
"""The file that every checkpoint of a framework holds."""


class CheckpointError(UserError):
    """A checkpoint that is not there, not whole, of another model, or has nowhere to go."""


def check_target(folder: str | Path, framework: str) -> None:
    """Raises `CheckpointError` where ``folder`` holds something that a checkpoint would replace,
    or cannot be made."""
    target = Path(folder).absolute()
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file: a checkpoint is a folder, give another name")
    if target.exists() and not (target / MARKS[framework]).exists() and any(target.iterdir()):
        raise CheckpointError(
            f"{target} exists and is no checkpoint: give another folder, or empty this one"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint can be written to {target}: {error.strerror}; give another folder"
        ) from None
