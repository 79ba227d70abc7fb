"""What a checkpoint has of a JAX training: parameters and what optimizers keep, each by its name.

Names are those of the model and of the user's own optimizer, whichever plan trains them, and every
array counts as whole. What the loss closes over is not among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from autopar.frontends.jax import is_key, paths_of
from autopar.runtime.jax.checkpoint import Piece, Whole, layers_of, pieces_of
from autopar.runtime.jax.own_optimizer import OwnOptimizer
from autopar.runtime.jax.parallel import State, placed, put
from autopar.runtime.jax.staged import Pipeline
from autopar.runtime.jax.step import Step

_OWN = "optimizer"
"""Before the names of an own optimizer's state."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state of ``step``, and of an ``optimizer`` of the user's own beside it."""

    step: Step | Pipeline
    optimizer: OwnOptimizer | None

    def shapes(self, state: State, opt: Any) -> dict[str, Any]:
        """What `autopar.runtime.jax.checkpoint.read` is to find: shapes and dtypes by name."""
        arrays: dict[str, Any] = _counters(state)
        trained = self.step.layout.trained.items()
        for slot in _slots(state):
            every = {
                key: state[slot][key]  # those of stages in other processes are not there
                if key in state[slot]
                else jax.ShapeDtypeStruct(leaf.shape, leaf.parameter.dtype)
                for key, leaf in trained
            }
            named = jax.eval_shape(self.step.layout.names, every)
            arrays.update((f"{slot}/{name}", array) for name, array in named.items())
        return arrays | dict(self._own(opt))

    def pieces(self, state: State, opt: Any) -> dict[str, list[Piece]]:
        """What this process writes of each."""
        counters = _counters(state) if self.step.writes_counters else {}
        arrays = {name: pieces_of(array) for name, array in counters.items()}
        trained, writer = self.step.layout.trained, dict[str, str]()
        for key, leaf in trained.items():
            for name in leaf.names:
                writer.setdefault(name, key)  # of those that several stages hold, the first
        for slot in _slots(state):
            for key, array in state[slot].items():
                leaf, whole = trained[key], pieces_of(array)
                for i, name in enumerate(leaf.names):
                    if writer[name] == key:
                        arrays[f"{slot}/{name}"] = layers_of(whole, i) if leaf.layers else whole
        return arrays | {name: pieces_of(array) for name, array in self._own(opt)}

    def restored(self, arrays: Mapping[str, Whole], state: State, opt: Any) -> tuple[State, Any]:
        """State and own optimizer's state from ``arrays`` by name; ``state`` has the rest."""
        made: State = {"step": arrays["step"]}
        if "scale" in state:
            made["scale"] = {name: arrays[f"scale/{name}"] for name in state["scale"]}
        for slot in _slots(state):
            head = f"{slot}/"
            own = {n[len(head) :]: a for n, a in arrays.items() if n.startswith(head)}
            made[slot] = self.step.layout.gather_names(own)
        if self.optimizer is not None:
            leaves = [_as(arrays[f"{_OWN}/{path}"], known) for path, known in paths_of(opt)]
            given = jax.tree.unflatten(jax.tree.structure(opt), leaves)
            opt = put(given, placed(self.optimizer.mesh, self.optimizer.specs))
        return {**self.step.put_state(made), "frozen": state["frozen"]}, opt

    def _own(self, opt: Any) -> Iterator[tuple[str, Any]]:
        if self.optimizer is not None:
            for path, array in paths_of(opt):
                yield f"{_OWN}/{path}", jax.random.key_data(array) if is_key(array) else array


def _as(array: Whole, known: Any) -> Any:
    """What was saved of ``known``: random keys of their numbers."""
    if not is_key(known):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(known))


def _slots(state: State) -> list[str]:
    """Parameters, and what the plan's optimizer keeps of each."""
    return [slot for slot in state if slot not in ("step", "frozen", "scale")]


def _counters(state: State) -> dict[str, Any]:
    """The number of the step and, in float16, the scale of the loss."""
    scale = state.get("scale", {})
    return {"step": state["step"], **{f"scale/{name}": array for name, array in scale.items()}}
