"""Folders that are written whole or not at all: everything goes into a neighbour first, which is
then renamed."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from autopar.nouns.errors import UserError


class NotWritten(UserError):
    """A folder that could not be written; what was there is there still."""


def check_place(folder: str | Path, refusal: type[UserError]) -> bool:
    """Whether ``folder`` is there; raises ``refusal`` where no folder can be."""
    place = Path(folder)
    if place.is_symlink() and not place.exists():
        raise refusal(f"{place} is a link that leads nowhere; give -o a folder")
    if place.exists() and not place.is_dir():
        raise refusal(f"{place} is a file; give -o the name of a folder")
    return place.is_dir()


def same_files(folder: Path, files: Mapping[str, str | bytes]) -> bool:
    """Whether each of ``files``, relative path -> content, is there as it is."""
    return all(_content(folder / name) == stored(content) for name, content in files.items())


def stored(content: str | bytes) -> bytes:
    """What a file of ``content`` has in it."""
    return content if isinstance(content, bytes) else content.encode()


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def replace(folder: str | Path, files: Mapping[str, str | bytes]) -> None:
    """Puts ``files``, relative path -> content, in the place of ``folder``. Raises `NotWritten`."""
    target = Path(folder).resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise NotWritten(f"cannot write {target}: {error.strerror}") from None
    try:
        for name, content in files.items():
            file = new / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(stored(content))
        new.chmod(0o777 & ~umask())
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            os.rename(target, old / "old")
            os.rename(new, target)
            shutil.rmtree(old)
        else:
            os.rename(new, target)
    except OSError as error:
        raise NotWritten(f"cannot write {target}: {error.strerror}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def digest(content: bytes) -> str:
    """SHA-256 of what is in a file, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def umask() -> int:
    """What this process takes from the modes of new files."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
