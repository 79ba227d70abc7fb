"""CPU seconds of the tests by folder, printed behind their result beside what they may take.

In-process seconds of a test count for its folder; what other processes took (jobs of several ranks,
commands) is known when a worker ends, and stands in a line of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

BUDGET_S = 950
"""Of the whole suite, on one core; what is over is to be made faster, not left out."""
_SPENT = "cpu_s"
_BEGAN = pytest.StashKey[float]()
_OTHERS: list[float] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEGAN] = time.process_time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        spent = time.process_time() - item.stash.get(_BEGAN, time.process_time())
        report.user_properties.append((_SPENT, spent))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Workers hand over what their processes took."""
    times = os.times()
    others_s = times.children_user + times.children_system
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_SPENT] = others_s
    elif not session.config.getoption("numprocesses", None):
        _OTHERS.append(others_s)


def pytest_testnodedown(node: Any) -> None:
    _OTHERS.append(node.workeroutput.get(_SPENT, 0.0))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    by_folder: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == _SPENT:
                    folder = Path(report.nodeid.partition("::")[0]).parts[1:2]
                    by_folder[folder[0]] = by_folder.get(folder[0], 0.0) + value
    write(terminalreporter, by_folder)


def write(terminalreporter: Any, by_folder: Mapping[str, float]) -> None:
    total = sum(by_folder.values()) + sum(_OTHERS)
    terminalreporter.section(f"{total:.0f} CPU seconds of {BUDGET_S} that all tests may take")
    for folder, seconds in sorted(by_folder.items(), key=lambda pair: -pair[1]):
        terminalreporter.write_line(f"{seconds:7.1f}  tests/{folder}")
    terminalreporter.write_line(f"{sum(_OTHERS):7.1f}  other processes (jobs of ranks, commands)")
