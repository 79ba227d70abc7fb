"""What every benchmark prints: rows, targets, and the machine and versions beside them."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autopar.report import render
from autopar.report.render import table

NAME = 24
"""Letters of a row's name that are not folded."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that a benchmark must reach: ``value <= limit``."""

    name: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def machine() -> dict[str, Any]:
    """CPU, cores that this process may use, Python, and the packages that matter here."""
    packages = ("torch", "transformers", "ortools", "numpy")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: installed for name in packages if (installed := _version(name))},
    }


def show(rows: Sequence[dict[str, Any]], targets: Sequence[Target], as_json: bool) -> None:
    """One JSON object, or tables with the same content, on stdout."""
    if as_json:
        targets_data = [{**asdict(target), "met": target.met} for target in targets]
        print(json.dumps({"rows": list(rows), "targets": targets_data, "machine": machine()}))
        return
    columns = list(rows[0])
    shown = table(*columns, right=columns[1:])
    shown.columns[0].no_wrap = all(len(_cell(row.get(columns[0]))) <= NAME for row in rows)
    for row in rows:
        shown.add_row(*(_cell(row.get(column)) for column in columns))
    judged = table("target", "value", "at most", "", right=("value", "at most"))
    for target in targets:
        verdict = "met" if target.met else "MISSED"
        judged.add_row(target.name, _cell(target.value), _cell(target.limit), verdict)
    beside = ", ".join(f"{name} {value}" for name, value in machine().items())
    render.show([shown, "", judged, "", beside], width=140)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0.0 or abs(value) >= 5e-4 else f"{value:.1e}"
    return "-" if value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match.group(1) if match else platform.machine()
