"""What holds for all tests: those that start real processes stand in one line.

Under pytest-xdist every test marked ``gloo`` goes to the same worker, because two jobs of four
processes at once would only wait for each other's cores.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gloo"):
            item.add_marker(pytest.mark.xdist_group("gloo"))
