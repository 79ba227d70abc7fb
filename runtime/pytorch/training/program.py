"""An emitted program as a trainer takes it: what its ``model.py`` defines, and its ``train.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

from torch import nn

from autopar.emit.pytorch.train import How, train_text
from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from autopar.pipeline.actions import Lists
from autopar.runtime.pytorch.stage import Stage, Value
from autopar.runtime.shared.program_module import run_program
from autopar.runtime.shared.settings import Settings


@dataclass(frozen=True, slots=True)
class Program:
    """What an emitted ``model.py`` defines: ``model``, or ``stages`` and what goes with them; and
    the ``train.py`` beside it, None for the one that `autopar.emit.pytorch.train` gives."""

    mesh: Mapping[str, int]
    settings: Settings
    model: type[nn.Module] | None = None
    stages: tuple[Stage, ...] = ()
    values: Mapping[str, Value] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    lists: Lists = ()
    train: ModuleType | None = None

    @staticmethod
    def of(module: ModuleType, lists: Lists = (), train: ModuleType | None = None) -> Program:
        """``lists``: the plan's actions, for a program of several stages."""
        if not hasattr(module, "STAGES"):
            return Program(module.MESH, module.SETTINGS, module.Model, train=train)
        return Program(
            module.MESH,
            module.SETTINGS,
            stages=module.STAGES,
            values=module.VALUES,
            ties=getattr(module, "TIES", {}),
            lists=lists,
            train=train,
        )


def train_of(program: Program, workload: Workload) -> ModuleType:
    """The ``train.py`` of a program that has none beside it."""
    mesh = Mesh(tuple(program.mesh), tuple(program.mesh.values())).trimmed()
    settings = program.settings
    how = How(
        mesh,
        settings.zero,
        settings.microbatches,
        workload.clip_norm,
        program.model is None,
        offloads=settings.offloads,
        scales=settings.precision == "float16",
        limits=bool(settings.limits),
    )
    return run_program(train_text(how), "<train.py>")
