"""Examples as small models, for tests whose subject is what a plan does to them: the examples at
their own sizes are trained and verified by `tests.examples` alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
SIZES: Mapping[str, Mapping[str, str]] = {
    "02_gpt.py": {
        "WIDTH, HEADS, LAYERS = 128, 4, 4": "WIDTH, HEADS, LAYERS = 64, 4, 4",
        "BATCH, LENGTH = 16, 128": "BATCH, LENGTH = 16, 32",
    },
    "03_llama.py": {"BATCH, LENGTH = 16, 64": "BATCH, LENGTH = 16, 16"},
}
"""Lines of each, and what stands there instead: still worth a split over fast links."""


def small(example: str, folder: Path) -> str:
    """The path of a copy in ``folder``, with its sizes small."""
    text = (EXAMPLES / example).read_text()
    for line, instead in SIZES[example].items():
        assert text.count(f"\n{line}\n") == 1, f"{example} has no line {line!r}"
        text = text.replace(line, instead)
    copy = folder / example
    copy.write_text(text)
    config = (EXAMPLES / example).with_suffix(".json")
    if config.exists():
        copy.with_suffix(".json").write_text(config.read_text())
    return str(copy)
