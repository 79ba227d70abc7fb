"""What becomes of one spelling: planned under every layout and written, or why not."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.census import cause_of, is_defect
from benchmarks.planned import CLUSTER, write_plan
from benchmarks.worst_errors import short

LAYOUTS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "torch": {
        "free": {},
        "tp x shard": {"tp": "2", "dp_shard": "2"},
        "pp x dp": {"pp": "2", "dp_replicate": "2"},
        "pp": {"pp": "4"},
        "ZeRO 3": {"dp_shard": "4", "zero": "3"},
    },
    "jax": {
        "free": {},
        "tp x shard": {"tp": "2", "dp_shard": "2"},
        "pp x dp": {"pp": "2", "dp_replicate": "2"},
        "pp": {"pp": "4"},
        "ZeRO 3": {"dp_shard": "4", "zero": "3"},
    },
}
CHOICES: Mapping[str, Mapping[str, str]] = {
    "by itself": {},
    "2 chunks, tp x shard": {"tp": "2", "dp_shard": "2", "zero": "3", "loss_chunks": "2"},
    "2 chunks, pp x tp": {"pp": "2", "tp": "2", "loss_chunks": "2"},
    "2 pieces, tp x shard": {"tp": "2", "dp_shard": "2", "tp_pieces": "2"},
    "2 ahead, ZeRO 3": {"dp_shard": "4", "zero": "3", "prefetch": "2", "recompute": "full"},
    "none ahead, ZeRO 3": {"dp_shard": "4", "zero": "3", "prefetch": "0"},
    "8 bits, tp x shard": {"tp": "2", "dp_shard": "2", "precision": "fp8-row"},
}
"""On top of layouts, in PyTorch, in bfloat16; kernels of four H100 are chosen besides."""
GPUS = """name: four H100
groups:
  - {device: H100, count: 4}
levels:
  - {name: nvlink, span: 4, bandwidth: 450 GB/s, latency: 2 us}
"""
_MODEL = """from benchmarks.spellings.every import every

workload = every()[{name!r}].workload()
"""
_HALF = """import dataclasses

from benchmarks.spellings.every import every

workload = dataclasses.replace(every()[{name!r}].workload(), precision="bfloat16")
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one spelling under one layout.

    outcome: planned, and once it is verified right or WRONG; refused, in autopar's own words;
             defect, where these say that autopar is at fault; crashed; not there, where a package
             is missing that the spelling needs.
    why:     the first words of an error.
    folder:  of the plan.
    """

    name: str
    layout: str
    outcome: str
    why: str = ""
    folder: str = ""
    error: float | None = None


def outcomes(name: str, home: Path, choices: bool = False) -> list[Outcome]:
    """Plans ``name`` under every layout of its framework, or with `CHOICES`, into folders below
    ``home``."""
    layouts = CHOICES if choices else LAYOUTS[name.partition("/")[0]]
    try:
        return _outcomes(name, home, layouts, choices)
    except Exception as error:  # what the corpus is for
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{Path(last.filename).name}:{last.lineno} {short(error)}"
        return [Outcome(name, layout, "crashed", why) for layout in layouts]


def _outcomes(
    name: str, home: Path, layouts: Mapping[str, Mapping[str, str]], choices: bool
) -> list[Outcome]:
    from autopar.files.cluster_file import load_cluster
    from autopar.frontends.dispatch import capture
    from autopar.frontends.loading import load_workload
    from autopar.nouns.errors import UserError
    from benchmarks.spellings.every import every

    needs = every()[name].needs
    if needs and importlib.util.find_spec(needs) is None:
        return [Outcome(name, layout, "not there", needs) for layout in layouts]
    folder = home / name.replace("/", "_").replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model.py"
    model.write_text((_HALF if choices else _MODEL).format(name=name))
    gpus = folder / "gpus.yaml"
    gpus.write_text(GPUS)
    cluster = load_cluster(gpus if choices else CLUSTER)
    try:
        workload = load_workload(str(model))
        captured = capture(workload)
    except UserError as error:
        return [_refused(name, layout, error) for layout in layouts]
    made = []
    for number, (layout, fix) in enumerate(layouts.items()):
        try:
            to = folder / f"plan_{number}"
            write_plan(captured, workload, cluster, str(model), fix, to)
            made.append(Outcome(name, layout, "planned", folder=str(to)))
        except UserError as error:
            made.append(_refused(name, layout, error))
    return made


def _refused(name: str, layout: str, error: Exception) -> Outcome:
    text = str(error)
    broken = type(error).__name__ == "BrokenProgram"
    return Outcome(
        name, layout, "defect" if broken or is_defect(text) else "refused", cause_of(text)
    )
