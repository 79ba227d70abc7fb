"""Models of the tests, planned for eight devices and emitted."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from autopar.emit.jax import emit
from autopar.files.cluster_file import load_cluster
from autopar.frontends.jax import Captured, paths_of
from autopar.frontends.jax.capture import capture_workload
from autopar.lowering.collectives import Row, priced_collectives
from autopar.nouns.cluster import Cluster
from autopar.nouns.plan import Plan
from autopar.nouns.workload import Workload
from autopar.pipeline.schedules.of_plan import schedule_of
from autopar.planner.options import Options
from autopar.planner.planning import PlanResult, plan_captured
from autopar.runtime.jax.parallel import by_name
from autopar.runtime.jax.programs import pipeline_alone, run_program, step_alone
from autopar.runtime.jax.staged import Pipeline
from autopar.runtime.verify.jax import counting
from autopar.runtime.verify.jax import verify as jax_verify
from autopar.runtime.verify.jax.compiled import compiled, issued_collectives
from autopar.runtime.verify.jax.errors import errors
from autopar.runtime.verify.jax.record import Record, in_float64
from autopar.runtime.verify.jax.reference_steps import reference
from autopar.runtime.verify.jax.staged import out_of_order
from autopar.runtime.verify.verified import Errors
from tests.jax import models

CLUSTER = Path(__file__).parents[2] / "examples" / "clusters" / "h100_8.yaml"


LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "tp": {"dp_shard": "4", "tp": "2", "zero": "1"},
    "dp": {"dp_replicate": "8"},
    "ZeRO 3": {"dp_shard": "8", "zero": "3"},
}
"""For eight devices."""


def workload(model: models.Model, **options: Any) -> Workload:
    """A workload with random initial parameters and batches that differ from step to step."""
    largest = 10 if "label" in model.batch else models.V

    def batch(step: int = 0) -> Mapping[str, np.ndarray]:
        made = models.concrete(model.batch, "float32", seed=step, largest=largest)
        return {name: np.asarray(a) for name, a in made.items()}

    def init(key: Any) -> Any:
        made = models.concrete(model.params, "float32", seed=5)
        return jax.tree.map(lambda a, shape: a.astype(shape.dtype), made, model.params)

    return Workload(loss=model.loss, init=init, batch=batch, **options)


_references: dict[tuple[str, str], tuple[dict[str, Any], Record]] = {}
"""By model and options as text, with the options: a function's address in the text is its own only
as long as somebody holds it."""


@dataclass(frozen=True)
class Made:
    """A planned and emitted workload of the model ``name``."""

    name: str
    options: dict[str, Any]
    workload: Workload
    captured: Captured
    planned: PlanResult
    files: Mapping[str, str]

    @property
    def text(self) -> str:
        return self.files["model.py"]

    def changed(self, old: str, new: str) -> Made:
        """With another text in model.py."""
        return replace(self, files={**self.files, "model.py": self.text.replace(old, new)})

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def program(self, lift: str | None = None) -> ModuleType:
        return run_program(self.text, lift=lift)

    def priced(self) -> list[Row]:
        stored = {name: t.dtype for name, t in self.captured.tensors.items()}
        clips = self.workload.clip_norm is not None
        return priced_collectives(self.planned.lowered, self.plan, stored, clips)

    def priced_in_float64(self) -> list[Row]:
        """Everything that moves is a float of the program's precision."""
        return [replace(row, size_bytes=2 * row.size_bytes) for row in self.priced()]

    def staged(self) -> Pipeline:
        """The pipeline of the program, in float64."""
        return pipeline_alone(self.files, self.workload, lift="float64")

    def exact(self) -> tuple[Errors, list[Row]]:
        """Two steps in float64 against the reference, and the collectives of a step in float64."""
        assert self.workload.init is not None
        tree = self.workload.init(None)
        batches = [dict(self.workload.batch(i)) for i in range(jax_verify.STEPS)]
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda a: np.asarray(a, np.float64), tree)
            given = [{n: in_float64(a) for n, a in b.items()} for b in batches]
            if self.captured.draws is not None:
                given = [b | self.captured.draws.counted(b, wide=True) for b in given]
            key = (self.name, repr(self.options))
            options, right = _references.get(key, (None, None))
            if right is None or options != self.options:
                right = reference(self.workload, tree, batches, self.captured.stacks)
                _references[key] = (self.options, right)
            named = by_name(paths_of(wide), self.captured.stacks)
            named |= jax_verify.wide_constants(self.captured)
            if len(self.plan.stages) > 1:
                pipeline = self.staged()
                record = jax_verify.run(pipeline, named, given, right, aux=self.captured.aux)
                moved = issued_collectives(pipeline, given[0], parameters=named)
                assert not out_of_order(pipeline, schedule_of(self.plan).lists)
                return errors(record, right), moved
            step = step_alone(self.program("float64"), self.workload)
            function = compiled(step, step.watched, given[0], wide=True)
            record = jax_verify.run(step, named, given, right, function, self.captured.aux)
            layout = step.layout
            turns = layout.settings.scatters
            moved = counting.collectives(function.as_text(), layout.mesh, scatters=turns)
        return errors(record, right), moved


_made: dict[str, tuple[dict[str, Any], Made]] = {}
"""As `_references`, by choices too."""


def made(name: str, fix: Mapping[str, str], **options: Any) -> Made:
    """A model planned for eight devices, with some choices fixed; planned once."""
    key = repr((name, fix, options))
    known, program = _made.get(key, (None, None))
    if program is None or known != options:
        program = made_of(name, models.MODELS[name](), fix, **{"optimizer": "adamw", **options})
        _made[key] = (options, program)
    return program


def made_of(
    name: str,
    model: models.Model,
    fix: Mapping[str, str],
    whole: tuple[str, ...] = (),
    devices: Cluster | None = None,
    **options: Any,
) -> Made:
    """``whole``: kinds of ops that run whole on every device; ``devices``: others than GPUs.

    Trained by SGD, whose update compiles sooner than that of AdamW, which models by name have.
    """
    options = {"optimizer": "sgd", **options}
    given = workload(model, **options)
    captured = capture_workload(given)
    how = Options(replicated=whole)
    planned = plan_captured(captured, given, devices or cluster(), "models.py:model", fix, how)
    files = emit(planned.lowered, planned.plan, captured)
    return Made(name, options, given, captured, planned, files)


@functools.cache
def cluster() -> Any:
    return load_cluster(str(CLUSTER))
