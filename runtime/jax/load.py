"""From a plan folder to a trainer of its JAX program, with everything checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from autopar.files import plan_folder
from autopar.frontends.jax import Captured, paths_of
from autopar.frontends.jax.capture import capture_workload
from autopar.frontends.jax.draws import Draws
from autopar.frontends.shared.captured import Aux
from autopar.nouns.errors import UserError
from autopar.nouns.plan import Plan
from autopar.nouns.workload import Workload
from autopar.runtime.jax.batches import Batches
from autopar.runtime.jax.frozen import of_trained, parted
from autopar.runtime.jax.own_loss import fields
from autopar.runtime.jax.parallel import Layout, by_name, leave_at_once
from autopar.runtime.jax.programs import read_step
from autopar.runtime.jax.staged_trainer import StagedTrainer, put
from autopar.runtime.jax.step import Additions
from autopar.runtime.jax.stored import stored
from autopar.runtime.jax.trainer import Trainer
from autopar.runtime.jax.user_tree import UserTree
from autopar.runtime.shared.planned_batch import batch_of
from autopar.runtime.shared.planned_workload import workload_for
from autopar.runtime.shared.settings import (
    ProgramError,
    check_workload,
    tell_changes,
)
from autopar.runtime.shared.stale import changed_batch, check_fingerprint, check_tool


@dataclass(frozen=True, slots=True)
class Start:
    """What a plan's program starts from.

    stacks:    the user's arrays that hold several layers, see `by_name`.
    constants: arrays that the loss closes over, by name.
    aux:       what it returns beside the loss.
    draws:     the random numbers in it.
    """

    workload: Workload
    stacks: Mapping[str, Sequence[str]]
    constants: Mapping[str, Any]
    aux: Aux | None = None
    draws: Draws | None = None

    def parameters(self, layout: Layout) -> Mapping[str, Any]:
        """The workload's initial parameters, as `initial` of a step takes them."""
        assert self.workload.init is not None
        tree = self.workload.init(jax.random.key(self.workload.seed))
        check_arrays(tree, FROM_INIT)
        return layout.gather_names(by_name(paths_of(tree), self.stacks))

    def batch(self, number: int) -> Mapping[str, Any]:
        """The global batch of a step, with the random numbers that its keys give."""
        batch: Mapping[str, Any] = batch_of(self.workload, number)
        return batch if self.draws is None else self.draws.drawn(batch)


def read(
    folder: str | Path, check_model: bool = True, model: Any = None, params: Any = None
) -> Start:
    """What the program of the plan in ``folder`` starts from; raises as `load`."""
    plan = plan_folder.read_plan(folder)
    workload = workload_for(folder, model, partial(fields, params))
    captured = capture_workload(workload)
    if check_model:
        check_model_of(plan, captured, workload, folder, tell=model is None)
    return Start(workload, captured.stacks, captured.constants, captured.aux, captured.draws)


def load(
    folder: str | Path,
    check_model: bool = True,
    model: Any = None,
    params: Any = None,
    optimizer: Any = None,
    frozen: Any = None,
) -> Trainer:
    """The trainer of the plan in ``folder``, with the initial parameters of its workload, or of
    ``model`` where that is given, or ``params``.

    ``optimizer`` steps in the place of the plan's; ``frozen`` parameters stay as they are.

    Raises `StalePlan`, `TooFewDevices`, and what reading the folder raises.
    """
    leave_at_once()
    held_back = None
    if frozen is not None:
        if params is None or not callable(model):
            raise UserError("load(frozen=...) goes with model=loss and params=..., all of them")
        params, held_back = parted(params, frozen)
        model = of_trained(model, held_back)
    start = read(folder, check_model, model, params)
    step = read_step(folder, start.workload)
    init = start.workload.init
    assert init is not None
    shapes = jax.eval_shape(init, jax.random.key(start.workload.seed))
    tree = UserTree(step.layout, shapes, start.stacks)
    tree.check_program()
    if params is None:
        state = step.initial(start.parameters, start.constants)
    else:
        check_arrays(params)
        tree.check(params, "params=")
        own = stored(step, tree, params) if isinstance(step, Additions) else put(step, tree, params)
        state = step.state_of(own, start.constants)
    kind = Trainer if isinstance(step, Additions) else StagedTrainer
    trainer = kind(
        start.workload,
        step,
        state,
        Batches(step, plan_folder.read_batch(folder), start.draws),
        tree=tree,
        frozen=held_back,
        aux=start.aux,
    )
    if optimizer is not None:
        trainer.step_by(optimizer)
    return trainer


def check_model_of(
    plan: Plan, captured: Captured, workload: Workload, folder: str | Path, tell: bool = True
) -> None:
    """Raises `StalePlan` where ``captured`` is not what was planned, or not by this version, and
    `StaleSettings` where ``workload`` trains it otherwise. A changed learning rate and the like is
    told (``tell``), and used."""
    check_tool(plan)
    check_workload(plan, workload)
    check_fingerprint(plan, captured.fingerprint(), changed_batch(folder, captured.batch))
    if tell:
        tell_changes(plan, workload, captured.digests)


FROM_LOAD = "give load the arrays, or leave params=... out to start from init"
FROM_INIT = "to train or to verify, init(key) has to return arrays"


def check_arrays(params: Any, instead: str = FROM_LOAD) -> None:
    """Raises `ProgramError` where a leaf of ``params`` is a shape without numbers; ``instead``:
    what to do about it."""
    odd = next((p for p, leaf in paths_of(params) if isinstance(leaf, jax.ShapeDtypeStruct)), None)
    if odd is not None:
        raise ProgramError(
            f"params: {odd!r} is a shape without numbers, which is enough to plan; {instead}"
        )
