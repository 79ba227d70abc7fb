"""The model of a user's script in the place of the one that a plan's file would make."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autopar.files import plan_folder
from autopar.frontends.loading import NoModel, load_workload
from autopar.nouns.batch import BatchEntry
from autopar.nouns.optimizer import is_own, own_name
from autopar.nouns.plan import Plan
from autopar.nouns.workload import Workload, WorkloadError, workload_of

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


def maker_of(module: Any) -> Callable[[], Any]:
    """A callable that makes modules as ``module`` is, without memory for its weights."""
    from autopar.runtime.pytorch.own_model import skeleton

    return lambda: skeleton(module)


def maker_of_arrays(params: Any) -> Callable[[Any], Any]:
    """An ``init`` that gives ``params``, of which only shapes count where it is traced."""

    def init(key: Any) -> Any:
        import jax
        import jax.numpy as jnp

        def array(leaf: Any) -> Any:
            shape = isinstance(leaf, jax.ShapeDtypeStruct)
            return jnp.zeros(leaf.shape, leaf.dtype) if shape else leaf

        return jax.tree.map(array, params)

    return init


def closed_over(loss: Callable[..., Any], params: Any, frozen: Any) -> tuple[Any, Any]:
    """JAX: a loss of the parameters that are trained, and these; see `runtime.jax.frozen`."""
    from autopar.runtime.jax.frozen import of_trained, parted

    trained, held = parted(params, frozen)
    return of_trained(loss, held), trained


def name_of_optimizer(optimizer: Any, params: Any = None) -> str:
    """What a plan calls the user's ``optimizer``, by what it keeps of each parameter.

    params: JAX: the tree that it is for. Raises `UserError`.
    """
    if isinstance(optimizer, str):
        return optimizer
    if params is not None:
        from autopar.runtime.jax.own_optimizer import state_share as jax_share

        return own_name(jax_share(optimizer, params))
    from autopar.runtime.pytorch.state_size import state_share

    return own_name(state_share(optimizer))


def check_given(plan: Plan, optimizer: Any) -> None:
    """Raises `WorkloadError` where a plan for an optimizer of the user's own gets none."""
    if is_own(plan.optimizer) and optimizer is None:
        raise WorkloadError(
            f"the plan was made for an optimizer of the script's own ({plan.optimizer}): give it "
            "to load too, load(plan, model=..., optimizer=...), or plan with optimizer='adamw'"
        )


def zeros(entries: Sequence[BatchEntry]) -> dict[str, Any]:
    """A batch of the planned shapes for a JAX loss, its random keys as shapes alone."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    dtypes = {str(key.dtype): key.dtype for key in map(_key, ("threefry2x32", "rbg", "unsafe_rbg"))}

    def made(entry: BatchEntry) -> Any:
        if entry.dtype in dtypes:
            return jax.ShapeDtypeStruct(entry.shape, dtypes[entry.dtype])
        return np.zeros(entry.shape, jnp.dtype(entry.dtype))

    return {entry.name: made(entry) for entry in entries if entry.kind != "drawn"}


def _key(kind: str) -> Any:
    import jax

    return jax.eval_shape(lambda: jax.random.key(0, impl=kind))


def workload_for(folder: str | Path, model: Any = None, params: Any = None) -> Workload:
    """The workload that the plan in ``folder`` trains, with ``model`` in the place of its own.

    model:  None (the plan's file is run), a `Workload` or decorated class, a class or callable, or
            an `nn.Module`. Of the last three the plan knows the rest. JAX: the loss function.
    params: JAX: the tree of arrays that the loss function takes.

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
    made: dict[str, Any]
    if plan.framework == "jax":
        if not callable(model) or is_module(model) or params is None:
            raise WorkloadError(
                f"load(plan, model={type(model).__name__}): give the loss function and its "
                "parameters, load(plan, model=loss, params=...), or an autopar.Workload with "
                "loss=..., init=... and batch=..."
            )
        made = {"loss": model, "init": maker_of_arrays(params), "batch": lambda: zeros(entries)}
    elif callable(model):
        from autopar.runtime.pytorch.own_model import zeros as torch_zeros

        made = {
            "model": maker_of(model) if is_module(model) else model,
            "batch": lambda: torch_zeros(entries),
        }
    else:
        raise WorkloadError(
            f"load(plan, model={type(model).__name__}): give an nn.Module, a class or function "
            "that makes one, or an autopar.Workload"
        )
    return Workload(
        **made,
        optimizer=plan.optimizer,
        precision=plan.precision,
        clip_norm=plan.clip_norm,
        whole_inputs=tuple(
            e.name for e in entries if e.batch_dim is None and e.shape and e.kind == "data"
        ),
        **{name: ast.literal_eval(kept[name]) for name in TRAINING if name in kept},
    )
