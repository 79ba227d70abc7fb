"""What was measured, on which machine, with which versions: one SQLite file.

    machine(id, device, driver, libraries, seen_at, processor)
    measurement(machine, subject, key, size_bytes, flops, seconds, spread, repeats, measured_at)

`subject` is 'op', 'collective', 'waiting', 'overlap', 'process' or 'run', `key` names what was run
in one readable line. Every measurement is its own transaction, so an interruption loses nothing
that was measured; a file that SQLite calls corrupt is set aside, what can still be read is copied
into a new one, and both are named. Files of format 2, which do not say which CPU measured, are
taken on.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from autopar.errors import UserError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS machine (
    id TEXT PRIMARY KEY, device TEXT NOT NULL, driver TEXT NOT NULL, libraries TEXT NOT NULL,
    seen_at TEXT NOT NULL, processor TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS measurement (
    machine TEXT NOT NULL REFERENCES machine(id), subject TEXT NOT NULL, key TEXT NOT NULL,
    size_bytes REAL NOT NULL, flops REAL NOT NULL, seconds REAL NOT NULL, spread REAL NOT NULL,
    repeats INTEGER NOT NULL, measured_at TEXT NOT NULL,
    PRIMARY KEY (machine, subject, key, size_bytes, flops));
PRAGMA user_version = 3;
"""
VERSION = 3
_COLUMNS = {
    "machine": ["id", "device", "driver", "libraries", "seen_at", "processor"],
    "measurement": [
        *("machine", "subject", "key", "size_bytes", "flops"),
        *("seconds", "spread", "repeats", "measured_at"),
    ],
}
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_ADD_PROCESSOR = "ALTER TABLE machine ADD COLUMN processor TEXT NOT NULL DEFAULT ''"


class ProfileError(UserError):
    """A profile that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Machine:
    """Where measurements come from: a device, its driver, the libraries that ran, and the CPU.

    ``processor``: model and number of cores; empty where a profile does not say.
    """

    device: str
    driver: str
    libraries: str
    processor: str = ""

    @property
    def id(self) -> str:
        known = (self.device, self.driver, self.libraries, self.processor)
        return " | ".join(known if self.processor else known[:3])


@dataclass(frozen=True)
class Measurement:
    """Seconds of one op or collective; `spread` is (p90 - p10) / median over the repeats."""

    subject: str
    key: str
    size_bytes: float
    flops: float
    seconds: float
    spread: float
    repeats: int
    measured_at: str

    @property
    def is_physical(self) -> bool:
        """Whether a machine may reach these figures."""
        sizes = (self.size_bytes, self.flops)
        return 1e-9 < self.seconds < 1e5 and all(0 <= size < 1e24 for size in sizes)


class ProfileDb:
    """An open profile. Use as a context manager."""

    def __init__(self, path: str | Path, warn: Callable[[str], None] = lambda _: None) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise ProfileError(f"{path} is a folder, no profile; give the name of a file in it")
        if self.path.exists() and self.path.stat().st_size and not _healthy(self.path):
            if _is_text(self.path):
                raise ProfileError(f"{path} is a text file, no profile; give the name of another")
            _rescue(self.path, warn)
        try:
            self.connection = sqlite3.connect(self.path, timeout=30.0, isolation_level=None)
        except sqlite3.OperationalError as error:
            raise ProfileError(
                f"{path}: {error}; give a file in a folder that exists and can be written to"
            ) from None
        try:
            self._prepare()
        except BaseException:
            self.connection.close()
            raise

    def _prepare(self) -> None:
        """Brings the file to this format. Raises `ProfileError` where it is no profile."""
        path = self.path
        version = self.connection.execute("PRAGMA user_version").fetchone()[0]
        if _tables(self.connection) - set(_COLUMNS):
            raise ProfileError(f"{path} is another program's database; give the name of another")
        if version == 2:
            self.connection.execute(_ADD_PROCESSOR)
        elif version not in (0, VERSION):
            raise ProfileError(
                f"{path}: profile format {version}, this tool reads {VERSION}; profile again into "
                "another file"
            )
        self.connection.executescript(_SCHEMA)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = NORMAL")
        for table, columns in _COLUMNS.items():
            found = [row[1] for row in self.connection.execute(f"PRAGMA table_info({table})")]
            if found != columns:
                raise ProfileError(
                    f"{path}: its table {table} has columns {', '.join(found)}, not "
                    f"{', '.join(columns)}; profile again into another file"
                )

    def __enter__(self) -> ProfileDb:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.connection.close()

    def add(self, machine: Machine, measurement: Measurement) -> None:
        """Keep one measurement; the same one measured again replaces it.

        Raises:
            ProfileError: a figure that no machine reaches.
        """
        m = measurement
        if not m.is_physical:
            raise ProfileError(
                f"{m.key}: {m.seconds:g} s for {m.size_bytes:g} bytes and {m.flops:g} FLOPs "
                "is out of any physical range"
            )
        self.connection.execute(
            "INSERT OR IGNORE INTO machine VALUES (?, ?, ?, ?, ?, ?)",
            (
                machine.id,
                machine.device,
                machine.driver,
                machine.libraries,
                m.measured_at,
                machine.processor,
            ),
        )
        self.connection.execute(
            "INSERT OR REPLACE INTO measurement VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                machine.id,
                m.subject,
                m.key,
                m.size_bytes,
                m.flops,
                m.seconds,
                m.spread,
                m.repeats,
                m.measured_at,
            ),
        )

    def machines(self) -> list[Machine]:
        """Every machine that measured something, the latest last."""
        rows = self.connection.execute(
            "SELECT device, driver, libraries, processor FROM machine ORDER BY seen_at"
        )
        return [Machine(*row) for row in rows]

    def measurements(self, machine: Machine) -> list[Measurement]:
        """What `machine` measured, in a fixed order."""
        rows = self.connection.execute(
            "SELECT subject, key, size_bytes, flops, seconds, spread, repeats, measured_at "
            "FROM measurement WHERE machine = ? ORDER BY subject, key, size_bytes, flops",
            (machine.id,),
        )
        return [Measurement(*row) for row in rows]

    def done(self, machine: Machine) -> set[tuple[str, str, float, float]]:
        """What need not be measured again after an interruption."""
        return {(m.subject, m.key, m.size_bytes, m.flops) for m in self.measurements(machine)}

    def for_device(
        self,
        device: str,
        libraries: str | None,
        warn: Callable[[str], None],
        processor: str | None = None,
    ) -> Machine:
        """The machine whose measurements serve `device`.

        Other libraries than these, or another CPU than ``processor``, are used and said aloud; what
        is None is not compared. Machines that measured more than runs go first.

        Raises:
            ProfileError: nothing was measured on this device.
        """
        machines = self.machines()
        same = [machine for machine in machines if machine.device == device]
        if not same:
            known = ", ".join(sorted({m.device for m in machines})) or "nothing"
            raise ProfileError(
                f"{self.path} holds measurements of {known}, the cluster has {device}; "
                "run `autopar profile` on that cluster or leave the profile out"
            )
        profiled = [m for m in same if any(row.subject != "run" for row in self.measurements(m))]
        chosen = max(
            reversed(profiled or same),
            key=lambda m: (processor in (None, m.processor), libraries in (None, m.libraries)),
        )
        pairs = (
            ("with", chosen.libraries, libraries),
            ("on", chosen.processor or "a CPU that it does not name", processor),
        )
        differ = [pair for pair in pairs if pair[2] not in (None, pair[1])]
        if differ:
            measured = " ".join(f"{how} {was}" for how, was, _ in differ)
            here = " on ".join(str(now) for _, _, now in differ)
            warn(
                f"profile {self.path}: measured {measured}, here is {here}; "
                "times may have moved, `autopar profile` measures again"
            )
        return chosen


def _healthy(path: Path) -> bool:
    """False where the file is damaged.

    Raises:
        ProfileError: it cannot be read for another reason: others hold it, or it is not ours.
    """
    try:
        with closing(sqlite3.connect(path)) as connection:
            return bool(connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok")
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in _DAMAGED:
            return False
        raise ProfileError(
            f"{path}: {error}; wait until no other program uses it, or give another file"
        ) from None


def _tables(connection: sqlite3.Connection) -> set[str]:
    found = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    )
    return {name for (name,) in found}


def _is_text(path: Path) -> bool:
    """A file of somebody else's under the name of a profile, which is not to be touched."""
    with path.open("rb") as file:
        return b"\0" not in file.read(4096)


def _rescue(path: Path, warn: Callable[[str], None]) -> None:
    """Set the corrupt file aside and copy what can be read into a new one."""
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt{number}")).exists():
        number += 1
    path.rename(aside)
    kept = 0
    with closing(sqlite3.connect(path)) as new:
        new.executescript(_SCHEMA)
        for table, width in (("machine", 6), ("measurement", 9)):
            marks = ", ".join("?" * width)
            for row in _readable(aside, table):
                whole = row if len(row) == width else (*row, "")  # of format 2, without processor
                new.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", whole)
                kept += table == "measurement"
        new.commit()
    warn(f"{path} was damaged: kept as {aside}, {kept} measurements copied into a new file")


def _readable(path: Path, table: str) -> Iterator[tuple[object, ...]]:
    """Rows of `table` until the first that cannot be read, then from the other end."""
    seen: set[tuple[object, ...]] = set()
    for order in ("ASC", "DESC"):
        try:
            with closing(sqlite3.connect(path)) as connection:
                rows: Iterable[tuple[object, ...]] = connection.execute(
                    f"SELECT * FROM {table} ORDER BY rowid {order}"
                )
                for row in rows:
                    if row not in seen:
                        seen.add(row)
                        yield row
        except sqlite3.DatabaseError:
            continue
