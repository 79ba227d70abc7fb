"""The trainer of a JAX program of several stages, whose arrays lie on the devices of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.frontends.jax import paths_of
from autopar.runtime.jax.aux_tree import tree_of
from autopar.runtime.jax.frozen import held_by, joined, without
from autopar.runtime.jax.own_optimizer import OwnOptimizer
from autopar.runtime.jax.parallel import Outputs, by_name
from autopar.runtime.jax.staged import Pipeline
from autopar.runtime.jax.staged_memory import peak_bytes
from autopar.runtime.jax.trainer import Trainer
from autopar.runtime.jax.user_tree import Tree, UserTree
from autopar.runtime.shared.planned_batch import OtherBatch
from autopar.runtime.shared.settings import ProgramError

_ONE_STAGE = "plan with --fix pp=1 for a program of one stage, or leave the step to the plan"


@dataclass(slots=True)
class StagedTrainer(Trainer):
    """As `Trainer`. ``params`` and gradients are arrays of numpy in the host's memory, since no
    device has all of them."""

    _last: Any = None
    """The batch of the last step, cut."""

    def step(self, batch: Mapping[str, Any]) -> Any:
        """See `Trainer.step`."""
        self.save_if_due()
        self._last = self.batches.cut(batch)
        self.state, loss, self.gradient_norm, outputs = self.compiled.step(self.state, self._last)
        return self._with_aux(loss, outputs)

    def _with_aux(self, loss: Any, outputs: Outputs) -> Any:
        if self.aux is None:
            return loss
        return loss, tree_of(self.aux, loss, self.compiled.outputs.joined(outputs))

    def value_and_grad(self, batch: Mapping[str, Any]) -> tuple[Any, Tree]:
        """As `Trainer.value_and_grad`; the gradients are copied into the host's memory."""
        self._check_all_here("value_and_grad", "gradients")
        cut = self.batches.cut(batch)
        loss, gradients, outputs = self.compiled.gradients(self.state, cut)
        return self._with_aux(loss, outputs), self._on_host(gradients)

    def update(self, gradients: Tree) -> Any:
        """See `Trainer.update`."""
        self.user_tree.check(gradients, "the tree of gradients")
        made = self.compiled.reduced(_by_key(self.compiled, self.user_tree, gradients))
        self.state, self.gradient_norm = self.compiled.update(self.state, made)
        return self.gradient_norm

    def step_by(self, optimizer: OwnOptimizer) -> None:
        """Raises `ProgramError`: no device has all of the parameters that it is made for."""
        raise ProgramError(
            "load(optimizer=...): the parameters of a pipeline lie on the devices of "
            f"{len(self.compiled.stages)} stages, and an optimizer of your own may read all of "
            f"them at once; {_ONE_STAGE}"
        )

    def _check_all_here(self, asked: str, what: str) -> None:
        if jax.process_count() > 1:  # a stage may lie on the devices of several, too
            raise ProgramError(
                f"{asked}: no process of this job has all {what} of the pipeline; save(folder) "
                "writes all parameters, by name"
            )

    def _on_host(self, arrays: Mapping[str, Any]) -> Tree:
        """Parameters, or what is shaped as they are, as the user's tree of arrays of numpy."""
        return self.user_tree.tree(jax.tree.map(np.array, arrays))

    def evaluate(self, batch: Mapping[str, Any]) -> Any:
        """The loss of a global batch of the planned size, forward through all stages; nothing
        changes. Raises `OtherBatch` for one of another size."""
        cut = self.batches.cut_if_planned(batch)
        if cut is None:
            sizes = ", ".join(f"{e.name} {list(e.shape)}" for e in self.batches.data)
            raise OtherBatch(
                f"evaluate: a pipeline takes batches as they were planned, {sizes}; give one of "
                f"that size, or {_ONE_STAGE}"
            )
        return self._with_aux(*self.compiled.evaluate(self.state, cut))

    @property
    def params(self) -> Tree:
        """The parameters as the tree that the loss takes, copied into the host's memory. It may be
        set, but for what is frozen."""
        self._check_all_here("params", "parameters")
        trained = self._on_host(self.state["params"])
        if self.frozen is None:
            return trained
        held = held_by(self.compiled, self.state["frozen"], self.frozen)
        return joined(trained, jax.tree.map(np.array, held))

    @params.setter
    def params(self, tree: Tree) -> None:
        if self.frozen is not None:
            tree = without(tree, self.frozen)
        self.user_tree.check(tree, "the tree of parameters")
        self.state = {**self.state, "params": put(self.compiled, self.user_tree, tree)}

    @property
    def peak_memory_bytes(self) -> int:
        """What a step takes on the device that holds most, see `staged_memory`; 0 before the first
        one."""
        if self._last is None:
            return 0
        return peak_bytes(self.compiled, self.compiled.apart(self.state), self._last)


def put(step: Pipeline, tree: UserTree, given: Tree) -> dict[str, Any]:
    """See `autopar.runtime.jax.trainer.stored`."""
    return step.stored(_by_key(step, tree, given))


def _by_key(step: Pipeline, tree: UserTree, given: Tree) -> dict[str, Any]:
    """A user's tree as arrays of numpy, by the keys of the layout."""
    dtypes = {path: leaf.dtype for path, leaf in paths_of(tree.shapes)}
    arrays = ((path, np.asarray(leaf).astype(dtypes[path])) for path, leaf in paths_of(given))
    return step.layout.gather_names(by_name(arrays, tree.stacks))
