"""Of cases that are alike the suite runs a few, `make test-all` every one.

A test marked ``some(n)`` has n of its cases, drawn by a fixed seed, unless the environment asks for
every one; `some` draws likewise where a fixture or a process makes all that its tests look at.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

import pytest

from benchmarks.every_case import EVERY_CASE

SEED = 22

Case = TypeVar("Case")


def some(cases: Iterable[Case], count: int) -> list[Case]:
    """So many of ``cases`` in their order; all of them where every one is asked for."""
    given = list(cases)
    if os.environ.get(EVERY_CASE, "") not in ("", "0") or count >= len(given):
        return given
    drawn = random.Random(SEED).sample(range(len(given)), count)
    return [given[i] for i in sorted(drawn)]


@pytest.hookimpl(trylast=True)  # of what ``-k`` and ``-m`` have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    out: set[pytest.Item] = set()
    for each in cases.values():
        marker = each[0].get_closest_marker("some")
        assert marker is not None
        out.update(set(each).difference(some(each, marker.args[0])))
    if out:
        config.hook.pytest_deselected(items=sorted(out, key=items.index))
        items[:] = [item for item in items if item not in out]
