"""A program's pipeline with what trainers and `verify` ask for beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from autopar.nouns.workload import Workload
from autopar.runtime.jax import parallel, parts
from autopar.runtime.jax.parallel import Array, Arrays, OutputKinds, Outputs, State, placed
from autopar.runtime.jax.processes import owned
from autopar.runtime.shared.settings import ProgramError

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
        """The devices of the first stage here, where counters are."""
        return self.here[0].mesh

    @property
    def writes_counters(self) -> bool:
        """Whether a checkpoint has the counters from here: each stage has them."""
        return self.stages[0].is_here

    def watched(
        self, state: State, batch: Any, given: Arrays
    ) -> tuple[State, Array, Arrays, Outputs]:
        loss, gradients, outputs = self.gradients(state, batch)
        return self.update(state, self.reduced(given))[0], loss, gradients, outputs

    def reduced(self, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """Gradients by the keys of `layout` as `update` takes them."""
        return self._placed(arrays, {s.number: s.layout.specs(cut=True) for s in self.here})

    @property
    def outputs(self) -> OutputKinds:
        """Of what the loss function returns beside the loss."""
        known = getattr(self.program, "OUTPUTS", {})
        return OutputKinds(tuple(known.values()), self.layout.data_axes)

    def stored(self, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """Parameters by the keys of `layout` as a state holds them, in memory of their own."""
        return self._placed(arrays, {s.number: s.state_specs["params"] for s in self.here})

    def put_state(self, made: Mapping[str, Any]) -> State:
        """Slots and counters of a state, whole arrays, as it holds them."""
        return {
            name: owned(held, placed(self.mesh, self.here[0].state_specs[name]))
            if name in parts.COUNTERS
            else self._placed(held, {s.number: s.state_specs[name] for s in self.here})
            for name, held in made.items()
        }

    def state_of(self, params: Arrays, constants: Arrays = MappingProxyType({})) -> State:
        """The state before the first step, from parameters that lie as it holds them."""
        own = self.apart({"params": params})
        return self.joined(
            {s.number: parts.state_of(s, own[s.number]["params"], constants) for s in self.here}
        )

    def shapes(self, batch: Mapping[str, Any]) -> tuple[dict[int, State], dict[int, Arrays]]:
        """What stages hold, and what each takes of a global batch, see `parts.shapes`."""
        each = {stage.number: parts.shapes(stage, batch) for stage in self.here}
        return {n: held for n, (held, _) in each.items()}, {n: cut for n, (_, cut) in each.items()}

    def drawing(self, draw: Callable[[Arrays], Arrays], names: Iterable[str]) -> Any:
        """See `parts.drawing`: each stage draws what it reads."""
        wanted = list(names)
        each = {stage.number: parts.drawing(stage, draw, wanted) for stage in self.here}

        def run(keys: Arrays) -> dict[int, dict[str, Array]]:
            return {s.number: each[s.number](s.here(dict(keys))) for s in self.here}

        return run

    def _placed(
        self, arrays: Mapping[str, Any], specs: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Array]:
        made: dict[str, Array] = {}
        for stage in self.here:
            head = f"{stage.number}/"
            own = {key: arrays[head + key] for key in specs[stage.number]}
            there = owned(own, placed(stage.mesh, specs[stage.number]))
            made |= {head + key: array for key, array in there.items()}
        return made


class Pipeline(StagedAdditions, parallel.Pipeline):
    """What `pipeline_of` makes, of a program on our own modules."""


def pipeline_of(
    program: ModuleType, workload: Workload, train: ModuleType, schedule: str
) -> Pipeline:
    """``program``: model.py; ``train``: the train.py beside it, which imports the `Pipeline` of the
    parallel.py beside both; ``schedule``: the text of schedule.txt."""
    kind: Any = type("Pipeline", (StagedAdditions, train.Pipeline), {})
    try:
        made: Pipeline = kind(program, workload, train, schedule)
    except SystemExit as error:  # what a program's own files can say
        raise ProgramError(str(error)) from None
    return made
