"""What the training scripts of the examples print."""

from __future__ import annotations

import re
from pathlib import Path


def losses_of(*logs: Path) -> dict[tuple[str, str], float]:
    """By step and ``loss`` or ``held out``."""
    text = "".join(log.read_text() for log in logs)
    rows = re.findall(r"step (\d+)  (loss|held out) ([\d.]+)", text)
    return {(step, what): float(value) for step, what, value in rows}
