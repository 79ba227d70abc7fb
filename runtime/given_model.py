"""The objects of a user's script, of either framework, as a `Workload` has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.nouns.optimizer import own_name


def maker_of(module: Any) -> Callable[[], Any]:
    """A callable that makes modules as ``module`` is, without memory for its weights."""
    from autopar.runtime.pytorch.own_model import skeleton

    return lambda: skeleton(module)


def maker_of_arrays(params: Any) -> Callable[[Any], Any]:
    """An ``init`` that gives ``params``, of which only shapes count where it is traced."""
    from autopar.runtime.jax.own_loss import maker_of_arrays

    return maker_of_arrays(params)


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
