"""A step of a program of several stages: plays ``schedule.txt``, then ends it stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from autopar.runtime.jax.parallel.actions import in_order, read_schedule, ways_of
from autopar.runtime.jax.parallel.layout import Layout
from autopar.runtime.jax.parallel.outputs import Outputs
from autopar.runtime.jax.parallel.playing import Played, Player, Playing
from autopar.runtime.jax.parallel.stage_step import StageStep, held_of
from autopar.runtime.jax.parallel.tables import LOSS, Array, Arrays, State
from autopar.runtime.jax.parallel.ties import Ties
from autopar.runtime.jax.parallel.totals import Totals, places_of


class Pipeline:
    """The step of ``model.py`` and ``train.py``, as `Step` is of a model that is one stage.

    Every process calls the jitted functions of the stages that it has devices of, in one order for
    all, which follows ``schedule.txt`` on each place of ``pp``; devices run them as soon as what
    they read is there. A state has the arrays of these stages, by the number of the stage and their
    key there. ``log``: of the last step.
    """

    def __init__(
        self, program: ModuleType, workload: Any, train: ModuleType, schedule: str
    ) -> None:
        """``program``: model.py; ``train``: train.py; ``schedule``: the text of schedule.txt."""
        self.program, self.workload = program, workload
        self.train: Any = train
        self.stages = [
            StageStep(n, stage, program, workload, train) for n, stage in enumerate(program.STAGES)
        ]
        self.here = [stage for stage in self.stages if stage.is_here]
        places = places_of(self.stages)
        if not self.here:
            raise SystemExit(
                f"none of the {self.stages[0].mesh.size * len(places)} devices of "
                f"this plan are those of process {jax.process_index()}: plan for all of them"
            )
        self.layout = Layout.of_stages(program, [stage.layout for stage in self.stages])
        self.ways = ways_of(program.STAGES, program.VALUES)
        self.actions = in_order(read_schedule(schedule), self.ways)
        self.ties = Ties(self.stages)
        self.totals = Totals(self.here, places)
        self.microbatches = self.layout.settings.microbatches
        self.makers: dict[str, int] = {}  # of each output the first stage that gives it
        for stage in self.stages:
            self.makers = {**dict.fromkeys(stage.outputs.values(), stage.number), **self.makers}
        if self.makers and jax.process_count() > 1:
            raise SystemExit(
                f"the loss function returns {len(self.makers)} more than the loss, which lie on "
                "the devices of one stage: in a job of several processes return the loss alone, or "
                "plan with pp=1"
            )
        self.player = Player(self.stages, self.actions, self.ways, self.makers)
        self.log: list[Played] = []

    # -- states and batches ----------------------------------------------------------------------

    def initial(
        self,
        parameters: Callable[[Layout], Arrays],
        constants: Arrays = MappingProxyType({}),
    ) -> State:
        """As `Part.initial`, of all stages."""
        return self.joined(
            {stage.number: stage.initial(parameters, constants) for stage in self.here}
        )

    def joined(self, own: Mapping[int, State]) -> State:
        """One state of those of the stages here; its counters are those of the first."""
        made: State = {}
        for n, state in own.items():
            for slot, held in state.items():
                if slot in ("step", "scale"):
                    made.setdefault(slot, held)
                else:
                    into = made.setdefault(slot, {})
                    into.update((f"{n}/{key}", array) for key, array in held.items())
        return made

    def apart(self, state: State) -> dict[int, State]:
        """The inverse, by the number of the stage: the counters are sent to all."""
        own: dict[int, State] = {}
        for stage in self.here:
            made: State = {}
            for slot, held in state.items():
                if slot in ("step", "scale"):
                    made[slot] = held if stage is self.here[0] else stage.here(held)
                else:
                    made[slot] = _own_part(held, stage.number)
            own[stage.number] = made
        return own

    def cut(
        self, batch: Mapping[str, Any], drawn: Mapping[int, Arrays] = MappingProxyType({})
    ) -> dict[int, Arrays]:
        """A global batch with its microbatches apart, for each stage here what it takes of it; what
        is ``drawn`` for each is so already."""
        return {s.number: s.cut(batch, drawn.get(s.number, {})) for s in self.here}

    # -- a step ----------------------------------------------------------------------------------

    def step(self, state: State, batch: Any) -> tuple[State, Array, Array, Outputs]:
        """The next state, the loss, the norm of the gradient, and what else the loss function
        returns, as `OutputKinds` leaves it. The arrays of ``state`` are gone afterwards."""
        loss, gradients, outputs = self.gradients(state, batch)
        state, norm = self.update(state, gradients)
        return state, loss, norm.astype(loss.dtype), outputs

    def gradients(self, state: State, batch: Any) -> tuple[Array, Arrays, Outputs]:
        """Loss and gradients of a global batch, and what is returned beside."""
        run = self._played(state, batch)
        made: dict[str, Array] = {}
        shares: dict[int, Array] = {}
        for stage in self.here:
            n = stage.number
            shares[n], reduced = stage.summed(run.losses[n], run.gradients.pop(n))
            made |= {f"{n}/{key}": array for key, array in reduced.items()}
        return self._loss(shares), self.ties.summed(made), self._outputs(run)

    def update(self, state: State, gradients: Arrays) -> tuple[State, Array]:
        """The next state, and the norm of the gradient."""
        own = {stage.number: _own_part(gradients, stage.number) for stage in self.here}
        known: dict[int, list[Any]] = {n: [] for n in own}
        if hasattr(self.train, "totals"):
            each = {stage.number: stage.totals(own[stage.number]) for stage in self.here}
            known = {n: [made] for n, made in self.totals.of_tuples(each).items()}
        states = self.apart(state)
        made = {
            s.number: s.updated(states[s.number], own[s.number], *known[s.number])
            for s in self.here
        }
        norm = made[self.here[0].number][1]
        return self.joined({n: one for n, (one, _) in made.items()}), norm

    def evaluate(self, state: State, batch: Any) -> tuple[Array, Outputs]:
        """The loss of a global batch, and what is returned beside; nothing changes."""
        run = self._played(state, batch, backward=False)
        shares = {stage.number: stage.loss_of(run.losses[stage.number]) for stage in self.here}
        return self._loss(shares), self._outputs(run)

    def _outputs(self, run: Playing) -> Outputs:
        """In the order of ``OUTPUTS``, each on the devices of the first stage that gives it."""
        made: dict[str, Array] = {}
        for stage in self.here:
            names = [own for own in stage.outputs.values() if self.makers[own] == stage.number]
            if names:
                each = [[run.outputs[n, i] for n in names] for i in range(self.microbatches)]
                made |= zip(names, stage.stacked(each), strict=True)
        return tuple(made[name] for name in getattr(self.program, "OUTPUTS", ()))

    def _played(self, state: State, batch: Any, backward: bool = True) -> Playing:
        run = self.player.play(self.apart(held_of(state)), batch, backward)
        self.log = run.log
        return run

    def _loss(self, shares: Mapping[int, Array]) -> Array:
        """The sum over all stages; those that give none have zeros of any dtype."""
        if jax.process_count() == 1:
            shares = {n: x for n, x in shares.items() if LOSS in self.stages[n].stage.gives}
        if not any(LOSS in each.stage.gives for each in self.stages):
            # an edited program, whose loss nobody is to take for a number
            return jnp.full((), jnp.nan)
        return self.totals.of(shares)[0]


def _own_part(held: Arrays, stage: int) -> dict[str, Array]:
    head = f"{stage}/"
    return {key[len(head) :]: array for key, array in held.items() if key.startswith(head)}
