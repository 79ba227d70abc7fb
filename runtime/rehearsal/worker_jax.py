"""A JAX plan's step lowered for accelerators that are not here.

    python -m autopar.runtime.rehearsal.worker_jax PLAN 0 FOLDER

What has no lowering for a platform is told by its primitive; FOLDER gets ``0.json``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar.runtime.jax.load import load, read
from autopar.runtime.rehearsal.findings import Finding
from autopar.runtime.rehearsal.rehearse import PLATFORMS


def findings(folder: str) -> list[Finding]:
    """What keeps the step from being lowered, by platform."""
    start = read(folder, check_model=False)
    trainer = load(folder, check_model=False)
    step = trainer.compiled
    state, batch = trainer.state, step.cut(start.batch(0))
    made = []
    for platform in PLATFORMS:
        try:
            step.step.trace(state, batch).lower(lowering_platforms=(platform,))
        except Exception as error:  # of a primitive, a kernel, or jax itself
            lines = str(error).splitlines() or [""]
            what = f"{platform}: {type(error).__name__}: {lines[0]}"
            made.append(Finding("refused", what, f"{folder}/program/model.py"))
    return made


def main(folder: str, out: Path) -> None:
    row: dict[str, Any] = {"rank": 0, "groups": []}
    row["findings"] = [asdict(finding) for finding in findings(folder)]
    (out / "0.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[3]))
