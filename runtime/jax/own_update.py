"""What ends a step where an optimizer of the user's own steps in the place of the plan's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autopar.runtime.jax.own_optimizer import OwnOptimizer, norm_of
from autopar.runtime.jax.parallel import Array, Arrays, State
from autopar.runtime.jax.parallel.loss_scale import next_scale, overflowed, scaled_norm, settled
from autopar.runtime.jax.step import Step
from autopar.runtime.jax.user_tree import UserTree


@dataclass(frozen=True, slots=True)
class OwnUpdate:
    """``tree``: the user's, of what gradients are given by the keys of the layout.

    clip_norm: the largest 2-norm of all gradients together; None: they are not clipped.
    scales:    whether the loss is scaled, so that a step whose gradients overflow is left out.
    """

    optimizer: OwnOptimizer
    tree: UserTree
    clip_norm: float | None
    scales: bool

    def updated(
        self, state: State, opt: Any, gradients: Arrays, loss: Array
    ) -> tuple[State, Any, Array]:
        """The program's state, the optimizer's and the norm, 0 where nothing is clipped; to be
        traced."""
        before, kept = state, opt
        norm, largest = jnp.zeros(()), self.clip_norm
        if largest is not None:
            norm = norm_of(self.tree.tree(gradients))
            scale = jnp.minimum(1.0, largest / (norm + 1e-6))
            gradients = {k: g * scale.astype(g.dtype) for k, g in gradients.items()}
        params, opt = self.optimizer.updated(state["params"], opt, gradients, loss)
        state = {**state, "params": params, "step": state["step"] + 1}
        if self.scales:
            overflow = overflowed(gradients)
            state, opt = settled(overflow, (before, kept), (state, opt))
            state["scale"] = next_scale(before["scale"], overflow)
            norm = scaled_norm(overflow, norm, largest)
        return state, opt, norm

    def step(self, step: Step) -> Any:
        """The backward of ``step``, then `updated`, jitted."""

        def run(state: State, opt: Any, batch: Arrays) -> tuple[Any, ...]:
            loss, gradients, outputs = step.gradients(state, batch)
            state, opt, norm = self.updated(state, opt, gradients, loss)
            return state, opt, loss, norm.astype(loss.dtype), outputs

        states, plain = (step.held_specs, self.optimizer.specs), PartitionSpec()
        made = (*states, plain, plain, step.outputs.specs)
        return step.compiled(run, (*states, step.batch_specs), made, donate=(0, 1))
