"""The workload that a plan trains: of the file that it names, or of a script's model."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.files import plan_folder
from autopar.frontends.loading import NoModel, load_workload
from autopar.nouns.batch import BatchEntry
from autopar.nouns.optimizer import is_own
from autopar.nouns.plan import Plan
from autopar.nouns.workload import Workload, WorkloadError, workload_of

Fields = Callable[[Any, Sequence[BatchEntry]], Mapping[str, Any]]
"""What makes the model and the batch of a `Workload` from a model of a script and the batch that
was planned for. Raises `WorkloadError`."""

TRAINING = ("learning_rate", "weight_decay", "betas", "eps", "seed", "has_aux")
"""What a plan remembers of its workload's optimizer, see `nouns.workload.training`."""


def planned_workload(folder: str | Path, plan: Plan) -> Workload:
    """The workload of the file that the plan in ``folder`` names. Raises `LoadError`."""
    try:
        return load_workload(plan_folder.workload_of(folder, plan))
    except (NoModel, plan_folder.PlanFolderError) as error:
        raise type(error)(
            f"{error}. If a script made this plan, that script trains it: autopar.load(plan, "
            "model=...). `autopar run` and `autopar verify` take their batches from a file: write "
            "workload = autopar.Workload(model=..., batch=...), for JAX loss=..., init=... and "
            "batch=..., and plan that file"
        ) from None


def is_module(model: Any) -> bool:
    """Whether ``model`` is an `nn.Module` object, of which this module need not know."""
    return not isinstance(model, type) and hasattr(model, "named_parameters")


def check_given(plan: Plan, optimizer: Any) -> None:
    """Raises `WorkloadError` where a plan for an optimizer of the user's own gets none."""
    if is_own(plan.optimizer) and optimizer is None:
        raise WorkloadError(
            f"the plan was made for an optimizer of the script's own ({plan.optimizer}): give it "
            "to load too, load(plan, model=..., optimizer=...), or plan with optimizer='adamw'"
        )


def workload_for(folder: str | Path, model: Any, fields: Fields) -> Workload:
    """The workload that the plan in ``folder`` trains, with ``model`` in the place of its own.

    model:  None (the plan's file is run), a `Workload` or decorated class, or what ``fields``
            takes; of that the plan knows the rest.
    fields: those of the framework.

    Raises `UserError`.
    """
    plan = plan_folder.read_plan(folder)
    if model is None:
        return planned_workload(folder, plan)
    whole = load_workload(model) if isinstance(model, str) else workload_of(model)
    if whole is not None:
        return whole
    entries = plan_folder.read_batch(folder)
    kept = plan.fingerprints.training
    return Workload(
        **fields(model, entries),
        optimizer=plan.optimizer,
        precision=plan.precision,
        clip_norm=plan.clip_norm,
        whole_inputs=tuple(
            e.name for e in entries if e.batch_dim is None and e.shape and e.kind == "data"
        ),
        **{name: ast.literal_eval(kept[name]) for name in TRAINING if name in kept},
    )
