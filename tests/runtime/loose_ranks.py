"""`tests.warm_ranks.loose` as a launcher: python -m tests.runtime.loose_ranks RANKS WORDS..."""

from __future__ import annotations

import importlib
import sys

from tests.warm_ranks import loose

if __name__ == "__main__":
    importlib.import_module("autopar.runtime.jobs.pytorch_worker")  # once, before the ranks
    sys.exit(loose(int(sys.argv[1]), sys.argv[2:]))
