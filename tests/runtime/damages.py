"""Ways in which a checkpoint's folder is damaged, in either framework, and what is said of each."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.runtime.shared.checkpoint_folder import MANIFEST, is_data


@dataclass(frozen=True)
class Damage:
    """``do(folder, other)`` with a checkpoint of its own and another one of the same model."""

    do: Callable[[Path, Path], object]
    message: str


def data(folder: Path) -> Path:
    """The largest of the files with arrays."""
    return max((f for f in folder.iterdir() if is_data(f.name)), key=lambda f: f.stat().st_size)


def flip(file: Path, place: float) -> None:
    raw = bytearray(file.read_bytes())
    raw[int(place * (len(raw) - 1))] ^= 0x10
    file.write_bytes(bytes(raw))


def cut(file: Path, share: float) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[: int(share * len(raw))])


def swap_blocks(file: Path) -> None:
    raw = file.read_bytes()
    half = len(raw) // 2
    file.write_bytes(raw[half:] + raw[:half])


def change_manifest(folder: Path, **changes: Any) -> None:
    """``checkpoint.json`` with other values and the digest that is right for them."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    manifest |= changes
    text = json.dumps(manifest, sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))


def edited(folder: Path) -> None:
    file = folder / MANIFEST
    size = str(data(folder).stat().st_size)
    file.write_text(file.read_text().replace(size, size + "1"))


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def a_file_instead(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


DAMAGES = {
    "a bit of the data": Damage(lambda c, _: flip(data(c), 0.5), "is damaged: its SHA-256"),
    "the first byte": Damage(lambda c, _: flip(data(c), 0.0), "is damaged: its SHA-256"),
    "the last byte": Damage(lambda c, _: flip(data(c), 1.0), "is damaged: its SHA-256"),
    "blocks in another order": Damage(lambda c, _: swap_blocks(data(c)), "is damaged: its SHA"),
    "zeros for data": Damage(
        lambda c, _: data(c).write_bytes(bytes(data(c).stat().st_size)), "is damaged: its SHA-256"
    ),
    "half of the data": Damage(lambda c, _: cut(data(c), 0.5), "bytes and had"),
    "a byte too few": Damage(lambda c, _: cut(data(c), 0.9999), "bytes and had"),
    "more at the end": Damage(
        lambda c, _: data(c).write_bytes(data(c).read_bytes() + b"\0"), "bytes and had"
    ),
    "an empty file": Damage(lambda c, _: data(c).write_bytes(b""), "has 0 bytes and had"),
    "no data": Damage(lambda c, _: data(c).unlink(), "is missing: the checkpoint has"),
    "a foreign file with data": Damage(
        lambda c, _: shutil.copy(data(c), c / f"x_{data(c).name.lstrip('_')}"),
        "was not written with the others",
    ),
    "no checkpoint.json": Damage(lambda c, _: (c / MANIFEST).unlink(), "which is written last"),
    "an empty checkpoint.json": Damage(
        lambda c, _: (c / MANIFEST).write_text(""), "checkpoint.json is damaged"
    ),
    "half of checkpoint.json": Damage(
        lambda c, _: cut(c / MANIFEST, 0.5), "checkpoint.json is damaged"
    ),
    "bytes for checkpoint.json": Damage(
        lambda c, _: (c / MANIFEST).write_bytes(b"\xff\xfe\0"), "checkpoint.json is damaged"
    ),
    "a list for checkpoint.json": Damage(
        lambda c, _: (c / MANIFEST).write_text("[]"), "checkpoint.json is damaged"
    ),
    "an edited checkpoint.json": Damage(lambda c, _: edited(c), "is damaged: its SHA-256"),
    "another format": Damage(lambda c, _: change_manifest(c, format=99), "checkpoint format 99"),
    "another framework": Damage(
        lambda c, _: change_manifest(c, framework="abacus"), "is a checkpoint of abacus"
    ),
    "data of another checkpoint": Damage(
        lambda c, other: shutil.copy(data(other), data(c)), "is damaged: its SHA-256|and had"
    ),
    "checkpoint.json of another one": Damage(
        lambda c, other: shutil.copy(other / MANIFEST, c / MANIFEST),
        "is damaged: its SHA-256|and had|is missing",
    ),
    "a file in its place": Damage(lambda c, _: a_file_instead(c), "is a file, and a checkpoint"),
    "nothing in its place": Damage(lambda c, _: shutil.rmtree(c), "no checkpoint in"),
    "an empty folder": Damage(lambda c, _: emptied(c), "no checkpoint in"),
}
TORCH_DAMAGES = {
    "a bit of the index": Damage(
        lambda c, _: flip(c / ".metadata", 0.5), ".metadata is damaged: its SHA-256"
    ),
    "an empty index": Damage(
        lambda c, _: (c / ".metadata").write_bytes(b""), ".metadata has 0 bytes and had"
    ),
    "no index": Damage(lambda c, _: (c / ".metadata").unlink(), ".metadata is missing"),
    "the index of another one": Damage(
        lambda c, other: shutil.copy(other / ".metadata", c / ".metadata"),
        "is damaged: its SHA-256|and had",
    ),
}


class Killed(BaseException):
    """The process ends here."""


class _Watch:
    """Raises at the n-th event by which Python touches what lies in a folder."""

    EVENTS = frozenset({"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove"})

    def __init__(self) -> None:
        self.folder = ""
        self.left = 0
        self.error: BaseException | None = None
        self.seen = 0
        self._added = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.error is None or event not in self.EVENTS:
            return
        if event == "open" and not (isinstance(arguments[1], str) and "w" in arguments[1]):
            return
        if not str(arguments[0]).startswith(self.folder):
            return
        self.seen += 1
        if self.seen == self.left:
            raise self.error

    @contextmanager
    def failing(self, folder: Path, at: int, error: BaseException) -> Iterator[_Watch]:
        if not self._added:
            sys.addaudithook(self)
            self._added = True
        self.folder, self.left, self.seen, self.error = str(folder), at, 0, error
        try:
            yield self
        finally:
            self.error = None

    @property
    def fired(self) -> bool:
        return self.seen >= self.left


failing = _Watch().failing
"""``with failing(folder, n, error)``: the n-th write in ``folder`` raises ``error``."""
