"""A file that is written whole or not at all: under another name first, which is then renamed."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from autopar.files.whole_folder import NotWritten, umask


def write(file: str | Path, text: str) -> None:
    """Puts ``text`` in the place of ``file``. Raises `NotWritten`, and then what was there is."""
    target = Path(file)
    if not target.is_file() and target.exists():  # a pipe, /dev/stdout
        target.write_text(text, encoding="utf-8")
        return
    target = target.resolve()
    beside = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        beside = Path(name)
        with open(descriptor, "w", encoding="utf-8") as to:
            to.write(text)
        mode = target.stat().st_mode if target.exists() else 0o666 & ~umask()
        beside.chmod(mode & 0o777)
        os.replace(beside, target)
    except OSError as error:
        raise NotWritten(f"cannot write {target}: {error.strerror}; give another place") from None
    finally:
        if beside is not None:
            with suppress(FileNotFoundError):
                beside.unlink()
