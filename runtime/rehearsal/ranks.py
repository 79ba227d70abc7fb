"""Ranks of a plan, rehearsed one after the other.

    python -m autopar.runtime.rehearsal.ranks PLAN 0,2 FOLDER

Each is a process of its own, since a device is put in once; FOLDER gets ``<rank>.json``. What all
import is imported once, without looking for garbage meanwhile: that takes a quarter longer.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path


def main(folder: Path, ranks: list[int], out: Path) -> None:
    gc.disable()
    from autopar.runtime.rehearsal import worker

    gc.enable()
    gc.freeze()
    for rank in ranks:
        child = os.fork()
        if child == 0:
            (out / f"{rank}.json").write_text(json.dumps(worker.rehearse(folder, rank)))
            os._exit(0)  # threads of torch's backward may not have ended
        os.waitpid(child, 0)
    os._exit(0)  # to take apart what was imported takes a second


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(rank) for rank in sys.argv[2].split(",")], Path(sys.argv[3]))
