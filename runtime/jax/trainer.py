"""The trainer of a JAX program: its state, and steps on global batches."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autopar.frontends.shared.captured import Aux
from autopar.nouns.workload import Workload
from autopar.runtime.jax import checkpoint
from autopar.runtime.jax.aux_tree import tree_of
from autopar.runtime.jax.batches import Batches
from autopar.runtime.jax.frozen import held_by, joined, without
from autopar.runtime.jax.other_sizes import any_size, placed_batch
from autopar.runtime.jax.own_optimizer import OwnOptimizer
from autopar.runtime.jax.own_update import OwnUpdate
from autopar.runtime.jax.parallel import Array, Arrays, Outputs, State, placed
from autopar.runtime.jax.processes import texts
from autopar.runtime.jax.saved_state import SavedState
from autopar.runtime.jax.step import held
from autopar.runtime.jax.stored import stored
from autopar.runtime.jax.user_tree import Tree, UserTree
from autopar.runtime.shared.keeping import Keeping
from autopar.runtime.shared.kept_checkpoints import (
    candidates,
    drop_old,
    load_first_whole,
    of_step,
    set_aside,
    something_kept,
)
from autopar.runtime.shared.settings import ProgramError
from autopar.runtime.shared.stopping import Stopping


@dataclass(slots=True)
class Trainer:
    """A program in training. ``gradient_norm`` of the last step, 0 where nothing is clipped.

    ``opt_state`` is that of an optimizer of the user's own, which steps in the place of the
    plan's; None where there is none. Read, it is a copy, as `params` are; what is set stays the
    user's.
    """

    workload: Workload
    compiled: Any  # a `Step`; of a `StagedTrainer` a `Pipeline`
    state: dict[str, Any]
    batches: Batches
    gradient_norm: Any = 0.0
    tree: UserTree | None = None
    frozen: Tree = None
    aux: Aux | None = None
    optimizer: OwnOptimizer | None = None
    _opt_state: Any = None
    _run: Any = None
    _jitted: dict[str, Any] = field(default_factory=dict)
    _stop: Stopping = field(default_factory=Stopping)
    _keeping: Keeping | None = None

    @property
    def step_number(self) -> int:
        """Steps taken so far, in float16 without those whose gradients overflowed."""
        return int(self.state["step"])

    @property
    def loss_scale(self) -> float | None:
        """By what the loss is multiplied in float16; None where it is not."""
        return float(self.state["scale"]["scale"]) if self.compiled.scales else None

    def step(self, batch: Mapping[str, Any]) -> Any:
        """One step on a global batch; returns its loss, of a loss function with ``has_aux`` the
        pair that it returns, of the whole batch.

        Raises `OtherBatch` for a batch that was not planned for.
        """
        self.save_if_due()
        cut = self.batches.cut(batch)
        if self._run is None:
            own = self.optimizer is not None
            function = self.own_update.step(self.compiled) if own else self.compiled.step
            self._run = function.lower(*self._before(), cut).compile()
        made = self._run(*self._before(), cut)
        if self.optimizer is None:
            self.state, loss, self.gradient_norm, *rest = made
        else:
            self.state, self._opt_state, loss, self.gradient_norm, *rest = made
        return self._with_aux(loss, rest[0] if rest else ())

    def _with_aux(self, loss: Array, outputs: Outputs) -> Any:
        """``loss``, or the pair of it and the user's ``aux``; ``outputs`` as of `OutputKinds`."""
        if self.aux is None:
            return loss
        kinds = self.compiled.outputs
        function = self._once(
            "aux", lambda: self.compiled.compiled(kinds.joined, (kinds.specs,), kinds.joined_specs)
        )
        return loss, tree_of(self.aux, loss, function(outputs))

    def value_and_grad(self, batch: Mapping[str, Any]) -> tuple[Any, Tree]:
        """Loss and gradients of a global batch, and no step: `jax.value_and_grad` of the loss, with
        ``has_aux`` of the pair.

        The gradients are a tree like the parameters, None where these are frozen, neither clipped
        nor scaled, and where ZeRO splits anything each device has its pieces. `update` takes them,
        or sums of them; or the user's own update, which gives `params` anew.
        """

        def made(state: State, batch: Arrays) -> tuple[Array, Tree, Outputs]:
            loss, gradients, outputs = self.compiled.gradients(state, batch)
            return loss, self.user_tree.tree(gradients), outputs

        step = self.compiled
        function = self._once(
            "value_and_grad",
            lambda: step.compiled(
                made,
                (step.held_specs, step.batch_specs),
                (PartitionSpec(), self.user_tree.specs(cut=True), step.outputs.specs),
            ),
        )
        loss, gradients, outputs = function(held(self.state), self.batches.cut(batch))
        return self._with_aux(loss, outputs), gradients

    def update(self, gradients: Tree) -> Any:
        """Steps the optimizer on ``gradients``, a tree like the parameters, clipped as the plan
        says; returns their norm, 0 where nothing is clipped."""
        self.user_tree.check(gradients, "the tree of gradients")
        step, specs = self.compiled, self.user_tree.specs(cut=True)
        gradients = jax.device_put(gradients, placed(step.mesh, specs))
        plain = PartitionSpec()
        if self.optimizer is None:

            def planned(state: State, gradients: Tree) -> tuple[State, Array]:
                made: tuple[State, Array] = step.update(state, self.user_tree.stored(gradients))
                return made

            known = step.state_specs
            function = self._once(
                "update", lambda: step.compiled(planned, (known, specs), (known, plain), (0,))
            )
            self.state, self.gradient_norm = function(self.state, gradients)
            return self.gradient_norm
        own, ends = self.optimizer, self.own_update

        def updated(state: State, opt: Any, gradients: Tree) -> tuple[State, Any, Array]:
            by_key = self.user_tree.stored(gradients)
            return ends.updated(state, opt, by_key, jnp.zeros(()))

        states = (step.held_specs, own.specs)
        function = self._once(
            "update",
            lambda: step.compiled(updated, (*states, specs), (*states, plain), donate=(0, 1)),
        )
        self.state, self._opt_state, self.gradient_norm = function(*self._before(), gradients)
        return self.gradient_norm

    def evaluate(self, batch: Mapping[str, Any]) -> Any:
        """The loss of a global batch as the parameters are now, with ``has_aux`` the pair that the
        loss function returns; nothing changes.

        Of the planned size it is the forward pass of the plan's program. Of any other it is the
        loss function as it stands, partitioned by XLA.
        """
        step = self.compiled
        cut = self.batches.cut_if_planned(batch)
        if cut is not None:
            known = (step.held_specs, step.batch_specs)
            made = (PartitionSpec(), step.outputs.specs)
            function = self._once("evaluate", lambda: step.compiled(step.evaluate, known, made))
            return self._with_aux(*function(held(self.state), cut))
        loss = self.workload.loss
        assert loss is not None
        keys, data = self.batches.apart(batch)
        given = {**placed_batch(step, self.batches.data, data), **keys}
        function = self._once("any size", lambda: any_size(step, self.user_tree, loss))
        return function(self.state["params"], given)

    @property
    def params(self) -> Tree:
        """The parameters as the tree that the loss takes, of arrays on the plan's devices: a copy,
        which later steps leave alone. Other functions take it, as in
        ``jax.jit(logits)(trainer.params, batch)``. It may be set, but for what is frozen."""
        specs = self.user_tree.specs(self._splits_parameters)

        def copied(params: Arrays) -> Tree:
            return jax.tree.map(jnp.copy, self.user_tree.tree(params))

        step = self.compiled
        function = self._once(
            "params", lambda: step.compiled(copied, (step.held_specs["params"],), specs)
        )
        trained = function(self.state["params"])
        if self.frozen is None:
            return trained
        return joined(trained, held_by(step, self.state["frozen"], self.frozen))

    @params.setter
    def params(self, tree: Tree) -> None:
        if self.frozen is not None:
            tree = without(tree, self.frozen)
        self.user_tree.check(tree, "the tree of parameters")
        self.state = {**self.state, "params": stored(self.compiled, self.user_tree, tree)}

    def step_by(self, given: Any) -> None:
        """Has the optimizer ``given`` step in the place of the plan's from here on, from its first
        state. Raises `UserError` as `OwnOptimizer.of`."""
        self.optimizer = OwnOptimizer.of(given, self.user_tree, self.compiled.mesh)
        self._opt_state = self.optimizer.init(self.state["params"])
        self.state = held(self.state)

    @property
    def opt_state(self) -> Any:
        if self.optimizer is None:
            return None
        return self._once("opt_state", self.optimizer.copying)(self._opt_state)

    @opt_state.setter
    def opt_state(self, state: Any) -> None:
        if self.optimizer is None:
            raise ProgramError(
                "opt_state: the plan's own optimizer steps here, whose state goes from trainer to "
                "trainer by save and load; give load(optimizer=...) to have one that can be set"
            )
        self._opt_state = self.optimizer.placed(state)

    @property
    def peak_memory_bytes(self) -> int:
        """What XLA asks of one device for a step: its arguments and its temporary arrays. 0 before
        the first step."""
        memory = None if self._run is None else self._run.memory_analysis()
        if memory is None:
            return 0
        return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes)

    def save(self, folder: str | Path, keep: int | None = None) -> None:
        """Writes parameters by full name, and the optimizer's state: any plan of the model can go
        on from them, on any number of devices and processes. All processes call.

        With ``keep`` it goes to ``folder/step-N``, and the oldest are removed so that so many are
        left.
        """
        target = Path(folder) if keep is None else of_step(folder, self.step_number)
        checkpoint.write(target, self._saved.pieces(self.state, self._opt_state))
        if keep is not None and jax.process_index() == 0:
            drop_old(folder, keep)

    def keep_checkpoints(self, folder: str | Path, every: int = 0, keep: int = 2) -> None:
        """Goes on from the newest checkpoint in ``folder``, if there is one, and from now on saves
        there, the ``keep`` newest: every so many steps, and on SIGTERM, which then ends the process
        with exit code 143. It saves where the next `step` begins; several processes, of which all
        call, look for SIGTERM where they save. A damaged newest one is told and set aside, and the
        one before is taken.
        """
        if texts("kept" if something_kept(folder) else "")[0]:
            passed = self._load(folder)
            if jax.process_index() == 0:
                set_aside(passed)
        self._stop.listen()
        self._keeping = Keeping(Path(folder), every, keep, self.step_number)

    def save_if_due(self) -> None:
        """Saves if it is time to, see `keep_checkpoints`."""
        keeping = self._keeping
        if keeping is None or keeping.saved == self.step_number:
            return
        alone = jax.process_count() == 1
        if not keeping.due(self.step_number) and not (alone and self._stop.asked):
            return
        stopping = any(texts("asked" if self._stop.asked else ""))
        self.save(keeping.folder, keeping.keep)
        keeping.saved = self.step_number
        if stopping:
            keeping.end(first=jax.process_index() == 0)

    def load(self, folder: str | Path) -> None:
        """Goes on from what `save` wrote, under this plan or another; of a folder of several from
        the newest that is whole: it is told which ones are passed over, and why.

        Raises `CheckpointError`, and leaves the trainer as it was.
        """
        self._load(folder)

    def _load(self, folder: str | Path) -> list[Path]:
        """`load`; what was passed over."""
        saved = self._saved
        shapes = saved.shapes(self.state, self._opt_state)
        arrays, passed = load_first_whole(
            _paths(folder), lambda path: checkpoint.read(path, shapes), tell
        )
        self.state, self._opt_state = saved.restored(arrays, self.state, self._opt_state)
        return passed

    @property
    def _saved(self) -> SavedState:
        return SavedState(self.compiled, self.optimizer)

    # -- what is compiled ------------------------------------------------------------------------

    @property
    def user_tree(self) -> UserTree:
        if self.tree is None:
            raise ProgramError("a trainer of `autopar.load` knows the tree of its parameters")
        return self.tree

    @property
    def _splits_parameters(self) -> bool:
        return bool(self.compiled.layout.splits_parameters)

    def _before(self) -> tuple[Any, ...]:
        return (self.state,) if self.optimizer is None else (self.state, self._opt_state)

    @property
    def own_update(self) -> OwnUpdate:
        """What ends a step where an optimizer of the user's own steps."""
        assert self.optimizer is not None
        clip_norm, scales = self.workload.clip_norm, self.compiled.scales
        return OwnUpdate(self.optimizer, self.user_tree, clip_norm, scales)

    def _once(self, name: str, make: Any) -> Any:
        if name not in self._jitted:
            self._jitted[name] = make()
        return self._jitted[name]


def _paths(folder: str | Path) -> list[Path]:
    """`candidates` as the first process sees them; a collective call."""
    names = json.loads(texts(json.dumps([str(path) for path in candidates(folder)]))[0])
    return [Path(name) for name in names]


def tell(text: str) -> None:
    if jax.process_index() == 0:
        print(f"autopar: {text}", file=sys.stderr, flush=True)
