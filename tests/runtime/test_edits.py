"""An edited program is told apart from its plan's own by line, comments aside."""

from __future__ import annotations

from autopar.runtime.shared.edits import edits

GIVEN = """def forward(x):
    'x [4, 4]'
    x = gather(x, axis="tp")  # [4, 8]
    x = x * 2
    return x
"""


def test_comments_docstrings_and_empty_lines_are_no_edits() -> None:
    text = (
        GIVEN.replace("  # [4, 8]", "")
        .replace("x [4, 4]", "x")
        .replace("    return", "\n    # at last\n    return")
    )
    assert text != GIVEN
    assert edits(text, GIVEN) == []


def test_a_line_that_is_missing_changed_or_added() -> None:
    gather = 'x = gather(x, axis="tp")'
    assert edits(GIVEN.replace(f"    {gather}  # [4, 8]\n", ""), GIVEN) == [
        f"before line 3, `{gather}` is missing"
    ]
    assert edits(GIVEN.replace("x * 2", "x * 3"), GIVEN) == [
        "line 4 is `x = x * 3`, the plan gives `x = x * 2`"
    ]
    assert edits(GIVEN.replace("    return", "    print(x)\n    y = x\n    return"), GIVEN) == [
        "line 5, `print(x)` and 1 more, is not the plan's"
    ]
    assert edits(GIVEN.replace("    return x\n", ""), GIVEN) == [
        "before line 5, `return x` is missing"
    ]
