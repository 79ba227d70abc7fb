"""Products with their collective in pieces, on four real processes started once: as the plain calls
to 1e-12, with as many collectives as there are pieces."""

from __future__ import annotations

from typing import Any

import pytest

from tests.warm_ranks import results_of

pytestmark = pytest.mark.gloo

KINDS = ("gathered", "copied", "scattered", "reduced")
NAMES = (
    *(f"{k} along dim {d} on {w}" for k in KINDS[::2] for w in (4, 2) for d in (0, 1, 2)),
    *(f"{k} along dim 1 on {w}" for k in KINDS[1::2] for w in (4, 2)),
    *(f"{k} {how}" for k in KINDS for how in ("frozen", "in two")),
    *("begun before waited", "of weights", "refusals"),
    *("rows that do not divide", "not twice differentiable"),
)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of("tests.runtime.tp_piece_ranks", tmp_path_factory.mktemp("pieces"))


def test_every_case_ran(checked: dict[str, Any]) -> None:
    assert set(checked) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_right(checked: dict[str, Any], name: str) -> None:
    assert checked[name] == "right"
