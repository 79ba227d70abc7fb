"""The trainer of a JAX program of several stages, whose arrays lie on the devices of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.frontends.jax import paths_of
from autopar.runtime.jax.all_stages import AllStages
from autopar.runtime.jax.aux_tree import tree_of
from autopar.runtime.jax.frozen import held_by, joined, without
from autopar.runtime.jax.own_optimizer import OwnOptimizer
from autopar.runtime.jax.parallel import Outputs, by_name
from autopar.runtime.jax.staged import Pipeline
from autopar.runtime.jax.staged_memory import beside, on_one, peak_bytes
from autopar.runtime.jax.step import held
from autopar.runtime.jax.trainer import Trainer, tell
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
    _all: AllStages | None = None
    """Where an optimizer of the user's own steps."""
    _updates: Any = None
    """Shapes of what its first step was given."""

    def step(self, batch: Mapping[str, Any]) -> Any:
        """See `Trainer.step`."""
        self.save_if_due()
        self._last = self.batches.cut(batch)
        if self._all is None:
            made = self.compiled.step(self.state, self._last)
            self.state, loss, self.gradient_norm, outputs = made
        else:
            loss, gradients, outputs = self.compiled.gradients(self.state, self._last)
            self._step_own(gradients, loss)
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
        given = _by_key(self.compiled, self.user_tree, gradients)
        if self._all is None:
            made = self.compiled.update(self.state, self.compiled.reduced(given))
            self.state, self.gradient_norm = made
        else:
            self._step_own(given, jnp.zeros(()))
        return self.gradient_norm

    def step_by(self, given: Any) -> None:
        """As `Trainer.step_by`, on the devices of all stages together.

        Raises `ProgramError` in a job of several processes.
        """
        if jax.process_count() > 1:
            raise ProgramError(
                "load(optimizer=...): an optimizer of your own steps on the devices of all "
                f"{len(self.compiled.stages)} stages together, and those of another process cannot "
                f"be sent to from here; {_ONE_STAGE}"
            )
        self._all = AllStages.of(self.compiled, self.user_tree)
        self.optimizer = OwnOptimizer.of(given, self._all.tree, self._all.mesh)
        self.state = held(self.state)
        there = self._all.arrays(self.state["params"])
        self._opt_state = self.optimizer.init(there)
        sent = sum(array.nbytes for array in there.values())
        tell(
            f"your optimizer steps on the {self._all.mesh.size} devices of all stages together: "
            f"gradients and parameters go there and parameters back, {sent / 1e6:.3g} MB each, in "
            "every step; the plan's prediction does not have that"
        )

    def _step_own(self, gradients: Mapping[str, Any], loss: Any) -> None:
        """A step of the user's own optimizer on gradients by the keys of the layout."""
        assert self._all is not None
        assert self.optimizer is not None
        state, specs = self._all.state(self.state), self.optimizer.specs
        given = state, self._opt_state, self._all.arrays(gradients), self._all.whole(loss)
        if self._run is None:
            self._run = self._all.compiled(self.own_update.updated, state, specs)
            self._updates = jax.tree.map(_shape, given)
        state, self._opt_state, norm = self._run(*given)
        self.state = {**self.state, **self._all.sent_back(state)}
        self.gradient_norm = norm.astype(loss.dtype)

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
        own = self.compiled.apart(self.state)
        if self._run is None:
            return peak_bytes(self.compiled, own, self._last)
        memory = self._run.lower(*self._updates).compile().memory_analysis()
        kept = on_one(self._opt_state)
        updates = int(memory.argument_size_in_bytes) - kept + beside(memory)
        return kept + peak_bytes(self.compiled, own, self._last, updates)


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def put(step: Pipeline, tree: UserTree, given: Tree) -> dict[str, Any]:
    """See `autopar.runtime.jax.stored.stored`."""
    return step.stored(_by_key(step, tree, given))


def _by_key(step: Pipeline, tree: UserTree, given: Tree) -> dict[str, Any]:
    """A user's tree as arrays of numpy, by the keys of the layout."""
    dtypes = {path: leaf.dtype for path, leaf in paths_of(tree.shapes)}
    arrays = ((path, np.asarray(leaf).astype(dtypes[path])) for path, leaf in paths_of(given))
    return step.layout.gather_names(by_name(arrays, tree.stacks))
