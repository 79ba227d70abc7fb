"""``torchrun train.py`` beside `autopar run`: the zoo and the examples, bit for bit.

    python -m benchmarks.train_files [--families llama,t5] [--plans tp;zb-v] [--json]

`autopar run`, `autopar verify` and scripts go by the trainer, `torchrun` by `main` of ``train.py``.
Both take a few steps on four processes under every layout of `benchmarks.zoo`, as two stages a
rank too; losses, weights and buffers of every rank are compared bit for bit. In JAX it is ``python
train.py``, one process, and the state of every device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.files import plan_folder
from autopar.runtime.jobs import jax_launch, pytorch_launch
from autopar.runtime.jobs.host_memory import environment
from benchmarks.figures import Target, show
from benchmarks.planned import planned_in
from benchmarks.zoo import EXAMPLES, PLANS
from benchmarks.zoo_models import ZOO

LAYOUTS: Mapping[str, Mapping[str, str]] = {
    **PLANS,
    "zb-v": {"pp": "4", "schedule": "zb-v", "microbatch": "1"},
    "interleaved x tp": {"pp": "2", "tp": "2", "interleave": "2", "schedule": "interleaved-1f1b"},
}


def differences(folders: Sequence[Path], ranks: int, where: Path) -> dict[str, str]:
    """What the worker of their framework finds in ``folders``, plans of so many ranks."""
    where.mkdir(parents=True, exist_ok=True)
    (where / "folders.json").write_text(json.dumps([str(folder) for folder in folders]))
    if plan_folder.read_plan(folders[0]).framework == "jax":
        worker = ["-m", "benchmarks.train_files_worker_jax", str(where)]
        code = python(worker, jax_launch.environment(ranks, "cpu"))
    else:
        worker = ["-m", "benchmarks.train_files_worker", str(where)]
        start = pytorch_launch.local_launcher(ranks, where / "codes.json")
        with environment():
            code = pytorch_launch.with_its_ranks([*start, *worker])
    if code:
        return {str(folder): f"the job ended with {code}" for folder in folders}
    found: dict[str, str] = json.loads((where / "results.json").read_text())
    return found


def python(words: Sequence[str], env: Mapping[str, str]) -> int:
    """The exit code of ``python WORDS`` in this environment."""
    return subprocess.run([sys.executable, *words], env=env).returncode


def rows(
    families: Iterable[str], layouts: Mapping[str, Mapping[str, str]], home: Path
) -> list[dict[str, Any]]:
    made = []
    for number, family in enumerate(families):
        home_of = home / str(number)
        folders, refused = planned_in(family, home_of, layouts)
        found = differences(list(folders.values()), 4, home_of / "job") if folders else {}
        outcome = {name: found[str(folder)] or "same" for name, folder in folders.items()}
        made += [{"family": family, "plan": n, "outcome": o} for n, o in outcome.items()]
        made += [{"family": family, "plan": n, "outcome": "refused"} for n in refused]
        same = sum(o == "same" for o in outcome.values())
        print(f"{family}: {same} of {len(outcome)} the same", file=sys.stderr, flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    examples = [name for name in EXAMPLES if "script" not in name]
    parser.add_argument("--families", default=",".join([*ZOO, *examples]))
    parser.add_argument("--plans", default=";".join(LAYOUTS), help="names of plans, by semicolons")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    layouts = {name: LAYOUTS[name] for name in given.plans.split(";")}
    with tempfile.TemporaryDirectory() as scratch:
        families = given.families.split(",")
        every = rows(families, layouts, Path(scratch))
    differ = [row for row in every if row["outcome"] not in ("same", "refused")]
    compared = {row["family"] for row in every if row["outcome"] != "refused"}
    targets = [
        Target("plans whose train.py does something else", len(differ), 0),
        Target("families of which no plan was compared", len(families) - len(compared), 0),
    ]
    show(every, targets, given.json)
    sys.exit(0 if all(target.met for target in targets) else 1)


if __name__ == "__main__":
    main()
