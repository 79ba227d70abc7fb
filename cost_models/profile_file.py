"""Whether a file is a profile, told from its first page and from a copy; nothing else is touched.

A profile is a database of SQLite with the tables of `SCHEMA`. SQLite writes when it reads: it makes
files beside a database and finishes the writes of others. So whatever a user names is looked at in
a copy of our own, and only a file that is a profile is ever opened in its place.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from autopar.nouns.errors import UserError

VERSION = 3
SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS machine (
    id TEXT PRIMARY KEY, device TEXT NOT NULL, driver TEXT NOT NULL, libraries TEXT NOT NULL,
    seen_at TEXT NOT NULL, processor TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS measurement (
    machine TEXT NOT NULL REFERENCES machine(id), subject TEXT NOT NULL, key TEXT NOT NULL,
    size_bytes REAL NOT NULL, flops REAL NOT NULL, seconds REAL NOT NULL, spread REAL NOT NULL,
    repeats INTEGER NOT NULL, measured_at TEXT NOT NULL,
    PRIMARY KEY (machine, subject, key, size_bytes, flops));
PRAGMA user_version = {VERSION};
COMMIT;
"""
_TAKE_ON = f"""
BEGIN IMMEDIATE;
ALTER TABLE machine ADD COLUMN processor TEXT NOT NULL DEFAULT '';
PRAGMA user_version = {VERSION};
COMMIT;
"""
_COLUMNS = {
    "machine": ["id", "device", "driver", "libraries", "seen_at", "processor"],
    "measurement": [
        *("machine", "subject", "key", "size_bytes", "flops"),
        *("seconds", "spread", "repeats", "measured_at"),
    ],
}
_WITHOUT_PROCESSOR = 2
_MAGIC = b"SQLite format 3\0"
_PAGE_BYTES = 4096
_LOGS = ("-wal", "-journal")
"""What SQLite keeps beside a database until it has been written into it."""
_COPIES = 5
PATIENCE_S = 5.0
"""How long to wait for another program that holds the file."""


class ProfileError(UserError):
    """A profile that cannot be used; the message says why and what to do."""


def check_profile(path: Path, new: bool = False) -> None:
    """Raises `ProfileError` where the first page says that ``path`` is no profile.

    new: the file is to be written: there may be none yet, or an empty one.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        if new:
            return
        raise ProfileError(
            f"no profile {path}; measure one with `autopar profile --cluster ... -o {path}`"
        ) from None
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}; give another file") from None
    if stat.S_ISDIR(status.st_mode):
        raise ProfileError(f"{path} is a folder, no profile; give the name of a file in it")
    if not stat.S_ISREG(status.st_mode):
        raise ProfileError(f"{path} is no regular file, so no profile; give another file")
    if not status.st_size:
        if new:
            return
        raise ProfileError(
            f"{path} is empty, no profile; measure one with `autopar profile --cluster ... "
            f"-o {path}`"
        )
    try:
        with path.open("rb") as file:
            page = file.read(_PAGE_BYTES)
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}; give another file") from None
    if not page.startswith(_MAGIC):
        what = "file of another kind" if b"\0" in page else "text file"
        raise ProfileError(
            f"{path} is a {what}, no profile; give one that `autopar profile` wrote, or the name "
            "of a new one"
        )
    if b"machine" not in page:
        raise ProfileError(f"{path} is another program's database; give the name of another")


def check_target(path: Path) -> None:
    """Raises `ProfileError` where no measurement could be written to ``path``; makes nothing."""
    check_profile(path, new=True)
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ProfileError(
            f"{path}: there is no folder {folder} that can be written to; give a file in one"
        )
    if path.exists() and not os.access(path, os.W_OK):
        raise ProfileError(f"{path} cannot be written to; give another file")
    if path.exists() and path.stat().st_size:
        with copied(path) as copy:
            if not damage(copy):
                connect(copy, path).close()


@contextmanager
def copied(path: Path) -> Iterator[Path]:
    """A copy of the profile ``path``, with what SQLite keeps beside it, in a folder of our own.

    Raises `ProfileError` where it cannot be read, or is written to all the time.
    """
    parts = [path, *(path.with_name(path.name + log) for log in _LOGS)]
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        copy = Path(folder) / "profile.db"
        try:
            for _ in range(_COPIES):
                before = _marks(parts)
                for part in parts:
                    there = copy.with_name(copy.name + part.name[len(path.name) :])
                    there.unlink(missing_ok=True)
                    if part.exists():
                        shutil.copyfile(part, there)
                if _marks(parts) == before:
                    break
            else:
                raise ProfileError(
                    f"{path} is being written to; wait until no other program uses it, or give "
                    "another file"
                )
        except OSError as error:
            raise ProfileError(
                f"{path} cannot be read: {error.strerror}; give another file"
            ) from None
        yield copy


def _marks(parts: Iterable[Path]) -> list[tuple[int, int] | None]:
    """Size and time of the last change of every file; None: there is none."""
    stats = [part.stat() if part.exists() else None for part in parts]
    return [None if one is None else (one.st_size, one.st_mtime_ns) for one in stats]


def damage(path: Path) -> str:
    """What SQLite says is broken in ``path``; empty where nothing is."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            verdict = str(connection.execute("PRAGMA integrity_check").fetchone()[0])
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if verdict == "ok" else " ".join(verdict.split())


def connect(path: Path, name: Path) -> sqlite3.Connection:
    """Opens ``path``, which messages call ``name``, in this format. An empty one gets the tables.

    Raises `ProfileError` where it is no profile, before anything in it is changed.
    """
    try:
        connection = sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None)
        try:
            _prepare(connection, name, empty=not path.stat().st_size)
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise refused(name, error) from None
    return connection


def refused(name: Path, error: sqlite3.Error) -> ProfileError:
    """What SQLite said of the file ``name``, with what to try."""
    busy = getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )
    if busy:
        return ProfileError(
            f"{name}: {error}; wait until no other program uses it, or give another file"
        )
    return ProfileError(
        f"{name}: {error}; give a file in a folder that exists, can be written to and has space"
    )


def _prepare(connection: sqlite3.Connection, name: Path, empty: bool) -> None:
    if empty:
        connection.executescript(SCHEMA)
        connection.execute("PRAGMA journal_mode = WAL")
    tables = _tables(connection)
    if tables - set(_COLUMNS) or not tables:
        raise ProfileError(f"{name} is another program's database; give the name of another")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (_WITHOUT_PROCESSOR, VERSION):
        raise ProfileError(
            f"{name}: profile format {version}, this tool reads {VERSION}; profile again into "
            "another file"
        )
    known = -1 if version == _WITHOUT_PROCESSOR else None
    for table, columns in _COLUMNS.items():
        present = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        wanted = columns[:known] if table == "machine" else columns
        if present != wanted:
            raise ProfileError(
                f"{name}: its table {table} has columns {', '.join(present)}, not "
                f"{', '.join(wanted)}; profile again into another file"
            )
    connection.execute("PRAGMA synchronous = NORMAL")
    if version == _WITHOUT_PROCESSOR:
        connection.executescript(_TAKE_ON)


def _tables(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    )
    return {name for (name,) in rows}


def rescue(path: Path, warn: Callable[[str], None]) -> None:
    """Sets a damaged profile aside and puts a new one in its place with what can be read.

    The new one is made first, whole. Raises `ProfileError`.
    """
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt{number}")).exists():
        number += 1
    new = path.with_name(f".{path.name}.new")
    kept = 0
    try:
        with copied(path) as copy:
            new.unlink(missing_ok=True)
            with closing(sqlite3.connect(new)) as connection:
                connection.executescript(SCHEMA)
                for table, columns in _COLUMNS.items():
                    marks = ", ".join("?" * len(columns))
                    for row in _readable(copy, table):
                        whole = row if len(row) == len(columns) else (*row, "")  # no processor
                        into = f"INSERT OR REPLACE INTO {table} VALUES ({marks})"
                        connection.execute(into, whole)
                        kept += table == "measurement"
                connection.commit()
        for log in ("", *_LOGS):
            part = path.with_name(path.name + log)
            if part.exists():
                os.rename(part, aside.with_name(aside.name + log))
        os.rename(new, path)
    except sqlite3.Error as error:
        raise refused(path, error) from None
    except OSError as error:
        raise ProfileError(
            f"{path} is damaged and cannot be set aside: {error.strerror}; give another file"
        ) from None
    finally:
        new.unlink(missing_ok=True)
    warn(f"{path} was damaged: kept as {aside}, {kept} measurements copied into a new file")


def _readable(path: Path, table: str) -> Iterator[tuple[object, ...]]:
    """Rows of `table` until the first that cannot be read, then from the other end."""
    seen: set[tuple[object, ...]] = set()
    for order in ("ASC", "DESC"):
        try:
            with closing(sqlite3.connect(path)) as connection:
                # else a file that lost its end is refused as a whole
                connection.execute("PRAGMA writable_schema = ON")
                rows: Iterable[tuple[object, ...]] = connection.execute(
                    f"SELECT * FROM {table} ORDER BY rowid {order}"
                )
                for row in rows:
                    if row not in seen:
                        seen.add(row)
                        yield row
        except sqlite3.DatabaseError:
            continue
