"""A program's step with what trainers and `verify` ask for beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from autopar.nouns.workload import Workload
from autopar.runtime.jax import parallel, parts
from autopar.runtime.jax.parallel import Array, Arrays, OutputKinds, Outputs, State, placed, put
from autopar.runtime.jax.processes import owned

if TYPE_CHECKING:
    Core = parallel.Step
else:
    Core = object  # the one of a program's own parallel.py comes behind, see `step_of`


class Additions(Core):
    """What is added in front of a program's own `Step`, see `step_of`: functions like its step.

    ``watched(state, batch, given)`` gives the reduced gradients in the norm's place, leaves the old
    state alone and steps on the gradients that are ``given``.

    ``gradients(held, batch)`` gives loss, reduced gradients and a tuple of what else the loss
    function returns, ``evaluate(held, batch)`` loss and tuple alone, and ``update(state,
    gradients)`` the next state and the norm; they are not jitted, and the first two take `held` of
    a state.
    """

    def __init__(self, program: ModuleType, workload: Workload, train: ModuleType) -> None:
        super().__init__(program, workload, train)
        state, plain = self.state_specs, PartitionSpec()
        self.held_specs = held(state)
        self.reduced_specs = self.layout.specs(cut=True)
        known, reduced = (self.held_specs, self.batch_specs), self.reduced_specs
        self.outputs = self.outputs or OutputKinds((), ())
        more = self.outputs.specs
        self.watched = self.jitted(
            self._watched, (state, self.batch_specs, reduced), (state, plain, reduced, more)
        )
        self.gradients = self.on_pieces(self._gradients, known, (plain, reduced, more))
        self.evaluate = self.on_pieces(self._evaluate, known, (plain, more))
        self.update = self.on_pieces(self._update, (state, reduced), (state, plain))

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled for backward."""
        return "scale" in self.state_specs

    writes_counters = True
    """Whether a checkpoint has the counters from here."""

    def on_devices(self, arrays: Arrays, shardings: Any) -> dict[str, Array]:
        """As the program's own, but that ``arrays`` stay the caller's: steps write over a state."""
        made: dict[str, Array] = owned(arrays, shardings)
        return made

    def put_state(self, made: Mapping[str, Any]) -> State:
        """Slots and counters of a state, whole arrays, as it holds them."""
        known = {name: self.state_specs[name] for name in made}
        state: State = put(dict(made), placed(self.mesh, known))
        return state

    def state_of(self, params: Arrays, constants: Arrays = MappingProxyType({})) -> State:
        """See `parts.state_of`."""
        return parts.state_of(self, params, constants)

    def drawing(self, draw: Callable[[Arrays], Arrays], names: Iterable[str]) -> Any:
        """See `parts.drawing`."""
        return parts.drawing(self, draw, names)

    def shapes(self, batch: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
        """What `step` and `watched` take, see `parts.shapes`."""
        return parts.shapes(self, batch)

    def _watched(
        self, state: State, batch: Arrays, given: Arrays
    ) -> tuple[State, Array, Arrays, Outputs]:
        loss, gradients, outputs = self._gradients(state, batch)
        return self.train.update(self, state, given)[0], loss, gradients, outputs

    def _gradients(self, state: State, batch: Arrays) -> tuple[Array, Arrays, Outputs]:
        loss, gradients, *outputs = self.train.backward(self, state, batch)
        return loss, gradients, outputs[0] if outputs else ()

    def _update(self, state: State, gradients: Arrays) -> tuple[State, Array]:
        made: tuple[State, Array] = self.train.update(self, state, gradients)
        return made

    def _evaluate(self, state: State, batch: Arrays) -> tuple[Array, Outputs]:
        def add(so_far: Array, microbatch: Arrays) -> tuple[Array, Outputs]:
            share, outputs = self.loss(state["params"], state["frozen"], microbatch)
            return so_far + share.astype(so_far.dtype), outputs

        first = {name: entry[0] for name, entry in batch.items()}
        share, _ = jax.eval_shape(lambda: self.loss(state["params"], state["frozen"], first))
        zero = jnp.zeros((), jnp.promote_types(share.dtype, jnp.float32))
        loss, outputs = lax.scan(add, zero, batch)
        loss = lax.psum(loss, self.layout.data_axes) if self.layout.data_axes else loss
        return loss, self.outputs.reduced(outputs)


def held(state: State) -> State:
    """What a forward and a backward pass read of a state, or of its specs."""
    return {n: state[n] for n in ("params", "frozen", "step", "scale") if n in state}


class Step(Additions, parallel.Step):
    """What `step_of` makes, of a program on our own modules."""


def step_of(program: ModuleType, workload: Workload, train: ModuleType) -> Step:
    """``program``: model.py; ``train``: the train.py beside it, which imports the `Step` of the
    parallel.py beside both."""
    kind: Any = type("Step", (Additions, train.Step), {})
    step: Step = kind(program, workload, train)
    return step
