"""Plan folders around the program that was written by hand."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from autopar.emit.pytorch.train import How, train_text
from autopar.files import plan_folder
from autopar.frontends.loading import load_workload
from autopar.frontends.shared.captured import Captured
from autopar.nouns import batch
from autopar.nouns import plan as plans
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Fingerprints, Spread, Stage
from autopar.nouns.style import Style
from autopar.nouns.text.graph import to_text
from tests.plans import cluster, plan, prediction

HERE = Path(__file__).parent
WORKLOAD = f"{HERE / 'tiny_gpt.py'}:workload"


@functools.cache
def captured(workload: str) -> Captured:
    from autopar.frontends.pytorch import capture

    return capture(load_workload(workload))


def write(
    folder: Path,
    mesh: dict[str, int],
    zero: int = 0,
    microbatches: int = 1,
    precision: str = "float32",
    workload: str = WORKLOAD,
    program: str | None = None,
    collectives: str = "",
    fingerprint: str | None = None,
    units: str = "layers.*",
    style: Style = "eager",
) -> Path:
    """A folder as `autopar plan` would leave it, as far as the runtime reads it."""
    place = cluster(math.prod(mesh.values()))
    adapted = replace(
        plan(),
        workload=workload,
        spreads=(Spread(Mesh(tuple(mesh), tuple(mesh.values()))),),
        stages=(Stage(zero=zero),),
        microbatches=microbatches,
        precision=precision,
        optimizer=load_workload(workload).optimizer,
        clip_norm=load_workload(workload).clip_norm,
        style=style,
        fingerprints=Fingerprints(
            fingerprint or captured(workload).fingerprint(),
            place.fingerprint,
            "p",
            version("autopar"),
        ),
        prediction=prediction(step_time_s=0.012),
    )
    text = program or (HERE / "tiny_gpt_program.py").read_text()
    head, rest = text.split("MESH = ", 1)
    rest = rest.split("\n\n", 1)[1]
    settings = (
        f"Settings(zero={zero}, microbatches={microbatches}, precision={precision!r}, "
        f"units={(units,) if units else ()})"
    )
    named = {**mesh, "tp": mesh.get("tp", 1)}  # all axes that the program names
    text = f"{head}MESH = {named}\nSETTINGS = {settings}\n\n{rest}"
    clips = load_workload(workload).clip_norm
    axes = Mesh(tuple(mesh), tuple(mesh.values())).trimmed()
    how = How(axes, zero, microbatches, clips, staged=False, style=style)
    files = {
        plan_folder.PLAN: plans.to_json(adapted),
        plan_folder.BATCH: batch.to_json(captured(workload).batch),
        plan_folder.GRAPH: to_text(captured(workload).graph),
        plan_folder.CLUSTER: place.to_json(),
        "program/model.py": text,
        "program/train.py": train_text(how),
    }
    if collectives:
        files[plan_folder.COLLECTIVES] = collectives
    plan_folder.write(folder, files)
    return folder
