"""A step of a program of several stages: plays ``schedule.txt``, then ends it stage by stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import jax

from autopar.runtime.jax.parallel.actions import Action, Way, in_order, read_schedule, ways_of
from autopar.runtime.jax.parallel.layout import Layout
from autopar.runtime.jax.parallel.outputs import Outputs
from autopar.runtime.jax.parallel.sends import Sends
from autopar.runtime.jax.parallel.stage_step import StageStep, held_of
from autopar.runtime.jax.parallel.tables import LOSS, Array, Arrays, State
from autopar.runtime.jax.parallel.ties import Ties
from autopar.runtime.jax.parallel.totals import Totals, places_of


class Sent(NamedTuple):
    """What went to another place on ``pp``: a value, or the ``gradient`` of one; ``size_bytes`` of
    each device."""

    value: str
    gradient: bool
    target: int
    size_bytes: int


class Played(NamedTuple):
    """An action, and what was sent behind it."""

    action: Action
    sent: tuple[Sent, ...]


@dataclass(frozen=True)
class _Run:
    """What is there between the actions of a step: of each stage here what it holds and takes,
    losses and gradients so far; outputs by name and microbatch; what is on its way; and what is
    kept of microbatches in flight."""

    held: Mapping[int, State]
    batch: Mapping[int, Arrays]
    losses: dict[int, list[Array]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[tuple[str, int], Any] = field(default_factory=dict)
    gradients: dict[int, Arrays] = field(default_factory=dict)
    mail: dict[tuple[Way, bool, int], Array] = field(default_factory=dict)
    kept: dict[tuple[int, int], Any] = field(default_factory=dict)


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
        if not self.here:
            raise SystemExit(
                f"none of the {self.stages[0].mesh.size * len(places_of(self.stages))} devices of "
                f"this plan are those of process {jax.process_index()}: plan for all of them"
            )
        self.layout = Layout.of_stages(program, [stage.layout for stage in self.stages])
        self.ways = ways_of(program.STAGES, program.VALUES)
        self.actions = in_order(read_schedule(schedule), self.ways)
        self.ties, self.sends = Ties(self.stages), Sends(self.stages)
        self.totals = Totals(self.here, places_of(self.stages))
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
        self.log: list[Played] = []
        self._into: dict[int, list[Way]] = {n: [] for n in range(len(self.stages))}
        self._from: dict[int, list[Way]] = {n: [] for n in range(len(self.stages))}
        for way in self.ways:
            self._into[way.reader].append(way)
            self._from[way.giver].append(way)

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
        run = self._play(self.apart(held_of(state)), batch)
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
        run = self._play(self.apart(held_of(state)), batch, backward=False)
        shares = {stage.number: stage.loss_of(run.losses[stage.number]) for stage in self.here}
        return self._loss(shares), self._outputs(run)

    def _outputs(self, run: _Run) -> Outputs:
        """In the order of ``OUTPUTS``, each on the devices of the first stage that gives it."""
        made: dict[str, Array] = {}
        for stage in self.here:
            names = [own for own in stage.outputs.values() if self.makers[own] == stage.number]
            if names:
                each = [[run.outputs[n, i] for n in names] for i in range(self.microbatches)]
                made |= zip(names, stage.stacked(each), strict=True)
        return tuple(made[name] for name in getattr(self.program, "OUTPUTS", ()))

    def _loss(self, shares: Mapping[int, Array]) -> Array:
        """The sum over all stages; those that give none have zeros of any dtype."""
        if jax.process_count() == 1:
            shares = {n: x for n, x in shares.items() if LOSS in self.stages[n].stage.gives}
        return self.totals.of(shares)[0]

    def _play(
        self, held: Mapping[int, State], batch: Mapping[int, Arrays], backward: bool = True
    ) -> _Run:
        self.log = []
        run = _Run(held, batch)
        if backward:
            run.gradients.update({s.number: s.nothing(held[s.number]) for s in self.here})
        for action in self.actions:
            made: Arrays | None = None
            if action.kind != "F" and not backward:
                continue
            if self.stages[action.stage].is_here:
                forward = action.kind == "F"
                made = (
                    self._forward(action, run, backward) if forward else self._backward(action, run)
                )
            sent = self._hand_on(action, made, run.mail)
            if made is not None:
                self.log.append(Played(action, sent))
        return run

    def _forward(self, action: Action, run: _Run, backward: bool) -> Arrays:
        n, _, i = action
        stage = self.stages[n]
        values = {way.value: run.mail.pop((way, False, i)) for way in self._into[n]}
        made: Arrays
        if backward:
            made, lost, residual = stage.forward(run.held[n], run.batch[n], i, values)
            run.kept[n, i] = {name: values[name] for name in stage.needed}, residual
        else:
            made, lost = stage.evaluated(run.held[n], run.batch[n], i, values)
        if LOSS in lost:
            run.losses[n].append(lost[LOSS])
        for name, own in stage.outputs.items():
            run.outputs[own, i] = self.sends.sent(name, n, self.makers[own], lost[name])
        return made

    def _backward(self, action: Action, run: _Run) -> Arrays:
        n, kind, i = action
        stage, given = self.stages[n], (run.held[n], run.batch[n], i)
        made: Arrays = {}
        if kind == "W":
            if stage.splits:
                kept = run.kept.pop((n, i))
                run.gradients[n] = stage.backward_weight(*given, *kept, run.gradients[n])
            return made
        coming: dict[str, list[Array]] = {}
        for way in self._from[n]:
            if way.gradient:
                coming.setdefault(way.value, []).append(run.mail.pop((way, True, i)))
        kept = run.kept.pop((n, i))
        if kind == "I" and stage.splits:
            made, later = stage.backward_input(*given, *kept, coming)
            run.kept[n, i] = *stage.pending(given, kept), later
        else:
            made, run.gradients[n] = stage.backward(*given, *kept, coming, run.gradients[n])
        return made

    def _hand_on(self, action: Action, made: Arrays | None, mail: Any) -> tuple[Sent, ...]:
        """Has what an action made be there where it is read; None: where it was made is not here,
        and what comes of it may be."""
        back = action.kind != "F"
        sent: list[Sent] = []
        if action.kind == "W":
            return ()
        for way in (self._into if back else self._from)[action.stage]:
            if back and not way.gradient:
                continue
            target = self.stages[way.giver if back else way.reader]
            given = None if made is None else made[way.value]
            pieces = self.sends.sent(way.value, action.stage, target.number, given)
            if given is not None and target.stage.rank != self.stages[action.stage].stage.rank:
                size = sum(x.nbytes for x in jax.tree.leaves(given)) // target.mesh.size
                sent.append(Sent(way.value, back, target.stage.rank, size))
            if target.is_here:
                mail[way, back, action.microbatch] = pieces
        return tuple(sent)


def _own_part(held: Arrays, stage: int) -> dict[str, Array]:
    head = f"{stage}/"
    return {key[len(head) :]: array for key, array in held.items() if key.startswith(head)}
