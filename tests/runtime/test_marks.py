"""Probes go behind the statements that a plan knows, in a program as it stands."""

from __future__ import annotations

import ast

import pytest

from autopar.emit.marks import instrumented, mark

MARKED = f"""from m import f, g


def forward(x):
    {mark([("up", "tp:S1")])}
    x = f(x)  # [4, 8]
    {mark([("one", "R"), ("two", "R")])}
    a, _ = g(x)
    {mark([("sum", "R")])}
    return x + a
"""
GIVEN = """from m import f, g


def forward(x):
    x = f(x)
    a, _ = g(x)
    return x + a
"""
PROBED = """from m import f, g
from autopar.probes import note as probe

def forward(x):
    x = f(x)
    x = probe('up', x, 'tp:S1')
    a, _ = g(x)
    a = probe('one', a, 'R')
    return probe('sum', x + a, 'R')
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("x = f(x)", "x = h(x)"),
        ("x + a", "x - a"),
        ("    a, _ = g(x)\n", "    print(x)\n    a, _ = g(x, 2)\n"),
    ],
)
def test_statements_are_found_again_also_where_they_were_edited(old: str, new: str) -> None:
    wanted = PROBED.replace(old, new)
    probed = instrumented(GIVEN.replace(old, new), MARKED, "autopar.probes.note")
    assert ast.dump(ast.parse(probed)) == ast.dump(
        ast.parse(wanted.replace("a = probe('one', a, 'R')\n    print(x)", "print(x)"))
    )


def test_a_statement_that_makes_something_else_has_no_probe() -> None:
    probed = instrumented(GIVEN.replace("x = f(x)", "y = f(x)"), MARKED, "autopar.probes.note")
    assert "'up'" not in probed
    assert "'one'" in probed
