"""Rows of each expert, given by a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cli.options import OptionError, parse_imbalance
from autopar.cost_models.measured_routes import measured_routes, rows_of
from autopar.cost_models.profile_db import Machine, ProfileDb
from autopar.files.expert_loads import ExpertLoadsError, read_loads

MACHINE = Machine("cpu-core", "a driver", "torch 2")


@pytest.mark.parametrize(
    "text",
    [
        "layers.0: [1, 2.5, 0]\nlayers.1: [4, 4, 4]\n",
        '{"layers.0": [1, 2.5, 0], "layers.1": [4, 4, 4]}',
    ],
    ids=["yaml", "json"],
)
def test_layers_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "loads.yaml"
    file.write_text(text)
    read = parse_imbalance(None, file)
    assert read is not None
    assert read.loads == {"layers.0": (1.0, 2.5, 0.0), "layers.1": (4.0, 4.0, 4.0)}
    assert read.mean == pytest.approx((2.5 / (3.5 / 3) + 1) / 2)
    assert read.worst == pytest.approx(1 + 2 * (read.mean - 1))
    assert "--expert-loads loads.yaml" in read.source
    with pytest.raises(OptionError, match="say one thing twice"):
        parse_imbalance("1.3", file)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("layers.0: [1, -2]", r"layers\.0\[1\]: -2 must be at least 0"),
        ("layers.0: [1, .inf]", r"layers\.0\[1\]"),
        ("layers.0: [1, x]", r"layers\.0\[1\]: 'x' is not a number"),
        ("layers.0: 3", r"layers\.0: 3 is not a list"),
        ("layers.0: []", r"layers\.0: empty"),
        ("layers.0: [0, 0]", r"all of layers\.0 are 0"),
        ("{}", "names no layer"),
        ("- 1", "keys with values"),
        ("a: [1]\na: [2]", "a"),
        ("a: [", "line"),
    ],
)
def test_what_is_wrong_is_said_with_how_to_write_it(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "loads.yaml"
    file.write_text(text)
    with pytest.raises(ExpertLoadsError, match=f"(?s){error}.*") as raised:
        read_loads(file)
    assert "loads.yaml" in str(raised.value)
    with pytest.raises(ExpertLoadsError, match="No such file"):
        read_loads(tmp_path / "none.yaml")


def test_a_profile_has_the_rows_of_the_last_run(tmp_path: Path) -> None:
    """An expert that had rows once and has none now has none; files without rows have none."""
    file = tmp_path / "profile.db"
    with ProfileDb(file) as db:
        db.add(MACHINE, *rows_of("m", 1.5, 2.0, 3, "2026-01-01T00:00:00"))
    known = measured_routes(file, "cpu-core", "m")
    assert known is not None
    assert known.loads == {}
    with ProfileDb(file) as db:
        for second, rows in ((1, [1, 2, 3]), (2, [0, 1, 3])):
            at = f"2026-01-01T00:00:0{second}"
            db.add(MACHINE, *rows_of("m", 1.5, 2.0, 3, at, {"layers.0": rows}))
        db.add(MACHINE, *rows_of("other", 1.5, 2.0, 3, at, {"layers.0": [9, 1]}))
    known = measured_routes(file, "cpu-core", "m")
    assert known is not None
    assert known.loads == {"layers.0": (0.0, 0.75, 2.25)}
    assert (known.mean, known.worst) == (1.5, 2.0)
