"""Which result of a JAX plan differs first from what one device computes.

The program as it stands, and one for a single device, run with probes forward and backward on one
batch in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from autopar.emit.marks import instrumented
from autopar.files import plan_folder
from autopar.frontends.jax import Captured
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Plan, Spread, Stage
from autopar.nouns.workload import Workload
from autopar.runtime.jax import parallel
from autopar.runtime.jax.programs import read_parallel, run_program, step_alone
from autopar.runtime.shared.edits import edits_of, program_of
from autopar.runtime.shared.seen import Seen
from autopar.runtime.verify.differences import describe_first, places_of
from autopar.runtime.verify.jax.probe import recording

PROBE = "autopar.runtime.verify.jax.probe.probe"
Ranks = list[list[Seen]]
"""What each device computes, in order."""


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
    changed = edits_of(folder, plan, captured)
    own = plan_folder.code_of(folder, plan_folder.MODEL).read_text()
    right = on_one_device(plan, captured, workload, parameters, batch)
    base = read_parallel(folder)
    return compared(own, right, plan, captured, workload, parameters, batch, changed, base)


def on_one_device(
    plan: Plan,
    captured: Captured,
    workload: Workload,
    parameters: Mapping[str, Any],
    batch: Mapping[str, Any],
) -> Ranks:
    """What the model of a plan computes there, for `compared`; arguments as for `locate`."""
    alone = replace(
        plan,
        spreads=(Spread(Mesh((), ())),),
        stages=(Stage(),),
        microbatches=1,
        precision="float32",
    )
    marked = program_of(alone, captured, probes=True)
    return _record(instrumented(marked, marked, PROBE), workload, parameters, batch, 1)


def compared(
    own: str,
    right: Ranks,
    plan: Plan,
    captured: Captured,
    workload: Workload,
    parameters: Mapping[str, Any],
    batch: Mapping[str, Any],
    changed: str = "",
    base: ModuleType = parallel,
) -> str:
    """`locate` for the program ``own`` on its ``base``, beside what one device computes."""
    spread = instrumented(own, program_of(plan, captured, marks=True), PROBE)
    actual = _record(spread, workload, parameters, batch, plan.microbatches, base)
    mesh = plan.spreads[0].mesh.trimmed()
    return describe_first(
        right, actual, mesh, plan.microbatches, 1, places_of(captured.graph), changed
    )


def _record(
    text: str,
    workload: Workload,
    parameters: Mapping[str, Any],
    batch: Mapping[str, Any],
    microbatches: int,
    base: ModuleType = parallel,
) -> Ranks:
    step = step_alone(run_program(text, lift="float64", base=base), workload, base)
    state = step.initial(lambda own: own.gather_names(parameters), parameters)
    any_gradients = step.layout.gather_names(parameters)  # of a step that nobody looks at
    with recording(step.mesh.axis_names, step.mesh.size, base) as recorded:
        jax.block_until_ready(step.watched(state, step.cut(batch), any_gradients))
        jax.effects_barrier()
    return recorded.ranks(microbatches)
