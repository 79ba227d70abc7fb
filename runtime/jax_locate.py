"""Which result of a JAX plan differs first from what one device computes.

The program as it stands, and one for a single device, run with probes forward and backward on one
batch in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from autopar import plan_folder
from autopar.frontends.jax import Captured
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan, Stage
from autopar.runtime.differences import Seen, places_of, said
from autopar.runtime.edits import program_of, told
from autopar.runtime.jax_load import run_program
from autopar.runtime.jax_probe import recording
from autopar.runtime.jax_train import Step
from autopar.runtime.marks import instrumented
from autopar.workload import Workload

PROBE = "autopar.runtime.jax_probe.probe"


def locate(
    folder: str | Path,
    plan: Plan,
    captured: Captured,
    workload: Workload,
    parameters: Mapping[str, Any],
    batch: Mapping[str, Any],
) -> str:
    """One sentence on the first result that differs. ``parameters`` by full name, and ``batch``, in
    float64; called with 64-bit types enabled."""
    changed = told(folder, plan, captured)
    own = plan_folder.code_of(folder, "jax").read_text()
    return compared(own, plan, captured, workload, parameters, batch, changed)


def compared(
    own: str,
    plan: Plan,
    captured: Captured,
    workload: Workload,
    parameters: Mapping[str, Any],
    batch: Mapping[str, Any],
    changed: str = "",
) -> str:
    """`locate` for the program ``own``."""
    spread = instrumented(own, program_of(plan, captured, marks=True), PROBE)
    alone = replace(
        plan,
        stages=(Stage(Mesh((), ())),),
        zero=0,
        microbatches=1,
        recompute="none",
        precision="float32",
    )
    marked = program_of(alone, captured, probes=True)
    single = instrumented(marked, marked, PROBE)
    right = _record(single, workload, parameters, batch, 1)
    found = _record(spread, workload, parameters, batch, plan.microbatches)
    mesh = plan.stages[0].mesh.trimmed()
    return said(right, found, mesh, plan.microbatches, places_of(captured.graph), changed)


def _record(
    text: str,
    workload: Workload,
    parameters: Mapping[str, Any],
    batch: Mapping[str, Any],
    microbatches: int,
) -> list[list[Seen]]:
    step = Step(run_program(text, lift="float64"), workload)
    state = step.initial(lambda: step.layout.gather_names(parameters), parameters)
    any_gradients = step.layout.gather_names(parameters)  # of a step that nobody looks at
    with recording(step.mesh.axis_names, step.mesh.size) as found:
        jax.block_until_ready(step.watched(state, step.cut(batch), any_gradients))
        jax.effects_barrier()
    return found.ranks(microbatches)
