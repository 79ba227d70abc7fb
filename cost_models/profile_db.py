"""What was measured, on which machine, with which versions: one SQLite file.

    machine(id, device, driver, libraries, seen_at, processor)
    measurement(machine, subject, key, size_bytes, flops, seconds, spread, repeats, measured_at)

`subject` is 'op', 'collective', 'waiting', 'overlap', 'process', 'run' or 'routes', `key` names
what was run in one readable line. Every measurement is its own transaction, so an interruption
loses nothing that was measured. Files of format 2, which do not say which CPU measured, are taken
on. What is read is a copy: a user's file, and the folder that it lies in, stay as they are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from autopar.cost_models.profile_file import (
    ProfileError,
    check_profile,
    connect,
    copied,
    damage,
    refused,
    rescue,
)

RUNS = ("run", "routes")
"""What runs of plans leave, and not `autopar profile`."""


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
        """Opens ``path`` for writing; makes it where there is none, or an empty file.

        A damaged profile is set aside and what can be read is copied into a new one; ``warn`` gets
        both names. Raises `ProfileError` for a file that is no profile, and leaves that as it is.
        """
        self.path = Path(path)
        check_profile(self.path, new=True)
        if self.path.exists() and self.path.stat().st_size:
            with copied(self.path) as copy:
                damaged = damage(copy)
                if not damaged:
                    connect(copy, self.path).close()
            if damaged:
                rescue(self.path, warn)
        self.connection = connect(self.path, self.path)

    @classmethod
    @contextmanager
    def reading(cls, path: str | Path) -> Iterator[ProfileDb]:
        """The profile ``path`` to read from; nothing is written to it or beside it.

        Raises `ProfileError` where it is none, or a damaged one.
        """
        check_profile(Path(path))
        with copied(Path(path)) as copy:
            if damaged := damage(copy):
                raise ProfileError(
                    f"{path} is damaged ({damaged}); `autopar profile --cluster ... -o {path}` "
                    "sets it aside and goes on with what can be read"
                )
            profile = cls.__new__(cls)
            profile.path, profile.connection = Path(path), connect(copy, Path(path))
            with profile:
                yield profile

    def __enter__(self) -> ProfileDb:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.connection.close()

    def add(self, machine: Machine, *measurements: Measurement) -> None:
        """Keep measurements, all of them or none; the same one measured again replaces it.

        Raises:
            ProfileError: a figure that no machine reaches, or a file that cannot be written to.
        """
        for m in measurements:
            if not m.is_physical:
                raise ProfileError(
                    f"{m.key}: {m.seconds:g} s for {m.size_bytes:g} bytes and {m.flops:g} FLOPs "
                    "is out of any physical range"
                )
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            for m in measurements:
                self._insert(machine, m)
            self.connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise refused(self.path, error) from None

    def _insert(self, machine: Machine, m: Measurement) -> None:
        known = (machine.id, machine.device, machine.driver, machine.libraries)
        self._into("OR IGNORE INTO machine", (*known, m.measured_at, machine.processor))
        sizes = (m.size_bytes, m.flops, m.seconds, m.spread, m.repeats)
        row = (machine.id, m.subject, m.key, *sizes, m.measured_at)
        self._into("OR REPLACE INTO measurement", row)

    def _into(self, table: str, row: Sequence[object]) -> None:
        marks = ", ".join("?" * len(row))
        self.connection.execute(f"INSERT {table} VALUES ({marks})", row)

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
        is None is not compared. Machines that measured more than runs go first, then those that did
        so by the same library, of whatever version.

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
        profiled = [m for m in same if any(row.subject not in RUNS for row in self.measurements(m))]
        chosen = max(
            reversed(profiled or same),
            key=lambda m: (
                processor in (None, m.processor),
                _library(libraries) in ("", _library(m.libraries)),
                libraries in (None, m.libraries),
            ),
        )
        pairs = (
            ("with", chosen.libraries, libraries),
            ("on", chosen.processor or "a CPU that it does not name", processor),
        )
        differ = [pair for pair in pairs if pair[2] not in (None, pair[1])]
        if differ:
            measured = " ".join(f"{how} {was}" for how, was, _ in differ)
            here = " on ".join(str(now) for _, _, now in differ)
            other = _library(libraries) not in ("", _library(chosen.libraries))
            by = f" --framework {_library(libraries)}" if other else ""
            warn(
                f"profile {self.path}: measured {measured}, here is {here}; "
                f"times may have moved, `autopar profile{by}` measures again"
            )
        return chosen


def _library(libraries: str | None) -> str:
    """``torch`` of ``torch 2.13.0``."""
    return (libraries or "").partition(" ")[0]
