"""A program's pipeline with what trainers and `verify` ask for beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from autopar.nouns.workload import Workload
from autopar.runtime.jax import parallel
from autopar.runtime.jax.parallel import Array, Arrays, OutputKinds, StageStep, State, placed
from autopar.runtime.jax.processes import owned

if TYPE_CHECKING:
    Core = parallel.Pipeline
else:
    Core = object  # the one of a program's own parallel.py comes behind, see `pipeline_of`


class StagedAdditions(Core):
    """What is added in front of a program's own `Pipeline`: as `autopar.runtime.jax.step.Additions`
    of a program of several stages.

    ``watched(state, batch, given)`` gives the gradients in the norm's place, and steps on those
    that are ``given``.
    """

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled for backward."""
        return "scale" in self.stages[0].state_specs

    @property
    def mesh(self) -> Mesh:
        """The devices of the first stage, where counters are."""
        return self.stages[0].mesh

    def watched(self, state: State, batch: Any, given: Arrays) -> tuple[State, Array, Arrays]:
        loss, gradients, *_ = self.gradients(state, batch)
        own = {s.number: s.layout.specs(cut=True) for s in self.stages}
        return self.update(state, self._placed(given, own))[0], loss, gradients

    def stored(self, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """Parameters by the keys of `layout` as a state holds them, in memory of their own."""
        return self._placed(arrays, {s.number: s.state_specs["params"] for s in self.stages})

    def put_state(self, made: Mapping[str, Any]) -> State:
        """Slots and counters of a state, whole arrays, as it holds them."""
        return {
            name: self.stages[0].here(held)
            if name in ("step", "scale")
            else self._placed(held, {s.number: s.state_specs[name] for s in self.stages})
            for name, held in made.items()
        }

    def state_of(self, params: Arrays, constants: Arrays = MappingProxyType({})) -> State:
        """The state before the first step, from parameters that lie as it holds them."""
        own = []
        for stage in self.stages:
            head = f"{stage.number}/"
            held = {k: params[head + k] for k in stage.layout.trained}
            own.append({"params": held, **_beside(stage, held, constants)})
        return self.joined(own)

    def shapes(self, batch: Mapping[str, Any]) -> tuple[list[State], list[Arrays]]:
        """What stages hold, and what each takes of a global batch, as shapes that lie somewhere."""
        held, cut = [], []
        for stage in self.stages:
            every = {**stage.layout.trained, **stage.layout.frozen}
            state: State = {
                slot: {key: (every[key].shape, every[key].parameter.dtype) for key in specs}
                for slot, specs in stage.state_specs.items()
                if slot not in ("step", "scale")
            }
            counters = jax.eval_shape(stage.counters)
            state |= jax.tree.map(lambda x: (x.shape, x.dtype), counters)
            entries = {
                name: (stage.cut_shape(name, batch[name]), batch[name].dtype)
                for name in stage.batch_specs
            }
            held.append(_lying(state, stage.state_specs, stage.mesh))
            cut.append(_lying(entries, stage.batch_specs, stage.mesh))
        return held, cut

    def drawing(self, draw: Callable[[Arrays], Arrays], names: Iterable[str]) -> Any:
        """See `Additions.drawing`: each stage draws what it reads."""
        wanted = list(names)
        each = [_drawing(stage, draw, wanted) for stage in self.stages]

        def run(keys: Arrays) -> list[dict[str, Array]]:
            pairs = zip(each, self.stages, strict=True)
            return [draws(stage.here(dict(keys))) for draws, stage in pairs]

        return run

    def _placed(
        self, arrays: Mapping[str, Any], specs: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Array]:
        made: dict[str, Array] = {}
        for stage in self.stages:
            head = f"{stage.number}/"
            own = {key: arrays[head + key] for key in specs[stage.number]}
            there = owned(own, placed(stage.mesh, specs[stage.number]))
            made |= {head + key: array for key, array in there.items()}
        return made


def _lying(sizes: Any, specs: Any, mesh: Mesh) -> Any:
    """(shape, dtype) pairs as shapes that lie by ``specs`` on ``mesh``."""
    return jax.tree.map(
        lambda sharding, size: jax.ShapeDtypeStruct(*size, sharding=sharding),
        placed(mesh, specs),
        sizes,
    )


def _beside(stage: StageStep, params: Arrays, constants: Arrays) -> State:
    """What a stage's state has beside parameters."""
    specs = placed(stage.mesh, stage.state_specs)

    def make() -> State:
        zeros = {k: jnp.zeros(p.shape, p.dtype) for k, p in params.items()}
        return {**dict.fromkeys(stage.slots, zeros), **stage.counters()}

    made = jax.eval_shape(make)
    state: State = jax.jit(make, out_shardings={name: specs[name] for name in made})()
    return {**state, "frozen": owned(stage.layout.gather_frozen(constants), specs["frozen"])}


def _drawing(stage: StageStep, draw: Callable[[Arrays], Arrays], names: Iterable[str]) -> Any:
    specs = {name: stage.batch_specs[name] for name in names if name in stage.batch_specs}

    def run(keys: Arrays) -> dict[str, Array]:
        made = draw(keys)
        return {name: stage.apart(name, made[name]) for name in specs}

    return stage.compiled(run, (PartitionSpec(),), specs)


class Pipeline(StagedAdditions, parallel.Pipeline):
    """What `pipeline_of` makes, of a program on our own modules."""


def pipeline_of(
    program: ModuleType, workload: Workload, train: ModuleType, schedule: str
) -> Pipeline:
    """``program``: model.py; ``train``: the train.py beside it, which imports the `Pipeline` of the
    parallel.py beside both; ``schedule``: the text of schedule.txt."""
    kind: Any = type("Pipeline", (StagedAdditions, train.Pipeline), {})
    made: Pipeline = kind(program, workload, train, schedule)
    made.outputs = made.outputs or OutputKinds((), ())
    return made
