"""``train.py`` of a JAX program where autopar is not installed, for `benchmarks.train_files`.

    python benchmarks/train_alone.py <program> <steps> <file for losses and state>

Run as a file, so that nothing of this project is imported, and whatever imports a module of it that
is not the program's own stub fails.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class Missing(MetaPathFinder):
    """What a machine without autopar says of it."""

    def __init__(self, stub: Path) -> None:
        self.stub = stub

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == "autopar":
            if name == "autopar" and str(self.stub) in sys.path:
                return None  # the path finder meets the stub first
            raise ModuleNotFoundError(f"No module named {name!r}")
        return None


def main(program: Path, steps: int, out: Path) -> None:
    import jax
    import numpy as np

    sys.meta_path.insert(0, Missing(program / "workload"))
    sys.path[:] = [str(program), *(p for p in sys.path if "autopar" not in Path(p).name)]
    train: Any = importlib.import_module("train")
    kind = "Pipeline" if hasattr(train, "Pipeline") else "Step"
    plain = getattr(train, kind)
    losses: list[bytes] = []
    state: dict[str, Any] = {}

    def recorded(*given: Any) -> Any:
        made = plain(*given)
        step = made.step

        def with_loss(*given: Any) -> Any:
            nonlocal state
            state, loss, *rest = step(*given)
            losses.append(np.asarray(loss).tobytes())
            return state, loss, *rest

        made.step = with_loss
        return made

    setattr(train, kind, recorded)
    train.main(steps)
    own = getattr(sys.modules.get("autopar"), "__file__", None)
    assert own is None or Path(own).parent == program / "workload", own
    held = {
        f"{jax.tree_util.keystr(path)} on {shard.device}": np.asarray(shard.data).tobytes()
        for path, array in jax.tree_util.tree_leaves_with_path(state)
        for shard in array.addressable_shards
    }
    out.write_bytes(pickle.dumps((losses, held)))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), Path(sys.argv[3]))
