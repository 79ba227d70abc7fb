"""An edited program is told apart from its plan's own by line, comments aside."""

from __future__ import annotations

import pytest

from autopar.runtime.edits import edits, transplanted

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


PROBED = """def forward(x):
    x = gather(x, axis="tp")  # [4, 8]
    x = probe("gathered", x)
    two = 2
    x = x * two
    x = probe("mul", x)
    return x
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('    x = gather(x, axis="tp")  # [4, 8]\n', ""),
        ('gather(x, axis="tp")', 'gather(x, axis="dp_shard")'),
        ("    return x", "    x = x.relu()\n    return x"),
    ],
)
def test_edits_of_lines_that_probes_leave_alone(old: str, new: str) -> None:
    found = transplanted(GIVEN.replace(old, new), GIVEN, PROBED)
    assert found is not None
    assert edits(found, PROBED.replace(old, new)) == []
    assert transplanted(GIVEN, GIVEN, PROBED) == PROBED


def test_an_edit_of_what_probes_break_up_is_not_transplanted() -> None:
    assert transplanted(GIVEN.replace("x * 2", "x * 3"), GIVEN, PROBED) is None
