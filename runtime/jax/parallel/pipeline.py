"""A step of a program of several stages: plays ``schedule.txt``, then ends it stage by stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import jax

from autopar.runtime.jax.parallel.actions import Action, Way, in_order, read_schedule, ways_of
from autopar.runtime.jax.parallel.layout import Layout
from autopar.runtime.jax.parallel.stage_step import StageStep, held_of
from autopar.runtime.jax.parallel.tables import LOSS, Array, Arrays, State
from autopar.runtime.jax.parallel.ties import Ties


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
    """What is there between the actions of a step: of each stage what it holds and takes, losses
    and gradients so far; what is on its way; and what is kept of microbatches in flight."""

    held: Sequence[State]
    batch: Sequence[Arrays]
    losses: dict[int, list[Arrays]] = field(default_factory=lambda: defaultdict(list))
    gradients: dict[int, Arrays] = field(default_factory=dict)
    mail: dict[tuple[Way, bool, int], Array] = field(default_factory=dict)
    kept: dict[tuple[int, int], Any] = field(default_factory=dict)


class Pipeline:
    """The step of ``model.py`` and ``train.py``, as `Step` is of a model that is one stage.

    One process calls the jitted functions of all stages in an order that follows ``schedule.txt``
    on each place of ``pp``; devices run them as soon as what they read is there. A state has the
    arrays of all stages, by the number of the stage and their key there. ``log``: of the last step.
    """

    def __init__(
        self, program: ModuleType, workload: Any, train: ModuleType, schedule: str
    ) -> None:
        """``program``: model.py; ``train``: train.py; ``schedule``: the text of schedule.txt."""
        if jax.process_count() > 1:
            raise SystemExit(
                f"one process calls all stages of a pipeline, and this job has "
                f"{jax.process_count()}: start one that sees all devices, or plan with pp=1"
            )
        self.program, self.workload = program, workload
        self.train: Any = train
        self.stages = [
            StageStep(n, stage, program, workload, train) for n, stage in enumerate(program.STAGES)
        ]
        self.layout = Layout.of_stages(program, [stage.layout for stage in self.stages])
        self.ways = ways_of(program.STAGES, program.VALUES)
        self.actions = in_order(read_schedule(schedule), self.ways)
        self.ties = Ties(self.stages)
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
        return self.joined([stage.initial(parameters, constants) for stage in self.stages])

    def joined(self, own: Sequence[State]) -> State:
        """One state of those of all stages; its counters are those of the first."""
        made: State = {}
        for n, state in enumerate(own):
            for slot, held in state.items():
                if slot in ("step", "scale"):
                    made.setdefault(slot, held)
                else:
                    into = made.setdefault(slot, {})
                    into.update((f"{n}/{key}", array) for key, array in held.items())
        return made

    def apart(self, state: State) -> list[State]:
        """The inverse: the counters are sent to all stages."""
        own: list[State] = []
        for stage in self.stages:
            made: State = {}
            for slot, held in state.items():
                if slot in ("step", "scale"):
                    made[slot] = stage.here(held) if stage.number else held
                else:
                    made[slot] = _own_part(held, stage.number)
            own.append(made)
        return own

    def cut(self, batch: Mapping[str, Any], drawn: Sequence[Arrays] = ()) -> list[Arrays]:
        """A global batch with its microbatches apart, for each stage what it takes of it; what is
        ``drawn`` for each is so already."""
        every = drawn or [{} for _ in self.stages]
        return [stage.cut(batch, own) for stage, own in zip(self.stages, every, strict=True)]

    # -- a step ----------------------------------------------------------------------------------

    def step(self, state: State, batch: Any) -> tuple[State, Array, Array]:
        """The next state, the loss and the norm of the gradient. The arrays of ``state`` are gone
        afterwards."""
        loss, gradients = self.gradients(state, batch)
        state, norm = self.update(state, gradients)
        return state, loss, norm.astype(loss.dtype)

    def gradients(self, state: State, batch: Any) -> tuple[Array, Arrays]:
        """Loss and gradients of a global batch."""
        losses, gradients = self._play(self.apart(held_of(state)), batch)
        made: dict[str, Array] = {}
        total: list[Array] = []
        for stage in self.stages:
            n = stage.number
            shares = [one[LOSS] for one in losses[n]]
            loss, reduced = stage.summed(shares, gradients.pop(n))
            total += [self.stages[0].here(loss)] * bool(shares)
            made |= {f"{n}/{key}": array for key, array in reduced.items()}
        return sum(total[1:], total[0]), self.ties.summed(made)

    def update(self, state: State, gradients: Arrays) -> tuple[State, Array]:
        """The next state, and the norm of the gradient."""
        own = [_own_part(gradients, stage.number) for stage in self.stages]
        totals = self._totals(own)
        states = self.apart(state)
        made = [stage.updated(states[n], own[n], *totals[n]) for n, stage in enumerate(self.stages)]
        return self.joined([one for one, _ in made]), made[0][1]

    def evaluate(self, state: State, batch: Any) -> Array:
        """The loss of a global batch; nothing changes."""
        losses, _ = self._play(self.apart(held_of(state)), batch, backward=False)
        total = [
            self.stages[0].here(stage.loss_of([one[LOSS] for one in losses[stage.number]]))
            for stage in self.stages
            if losses[stage.number]
        ]
        return sum(total[1:], total[0])

    def _totals(self, own: Sequence[Arrays]) -> list[list[Any]]:
        """For every stage what `update` is given beside its gradients: sums over all stages."""
        if not hasattr(self.train, "totals"):
            return [[] for _ in self.stages]
        first, *others = [stage.totals(own[stage.number]) for stage in self.stages]
        for other in others:
            first = jax.tree.map(lambda a, b: a + b, first, self.stages[0].here(other))
        return [[first if not stage.number else stage.here(first)] for stage in self.stages]

    def _play(
        self, held: Sequence[State], batch: Sequence[Arrays], backward: bool = True
    ) -> tuple[list[list[Arrays]], dict[int, Arrays]]:
        self.log = []
        run = _Run(held, batch)
        if backward:
            run.gradients.update({s.number: s.nothing(held[s.number]) for s in self.stages})
        for action in self.actions:
            if action.kind == "F":
                made = self._forward(action, run, backward)
            elif backward:
                made = self._backward(action, run)
            else:
                continue
            self.log.append(self._hand_on(action, made, run.mail))
        return [run.losses[stage.number] for stage in self.stages], run.gradients

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
        if lost:
            run.losses[n].append(lost)
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

    def _hand_on(self, action: Action, made: Arrays, mail: dict[Any, Array]) -> Played:
        sent = []
        back = action.kind != "F"
        ways = [] if action.kind == "W" else (self._into if back else self._from)[action.stage]
        for way in ways:
            if back and not way.gradient:
                continue
            target = self.stages[way.giver if back else way.reader]
            array = made[way.value]
            if target.stage.rank != self.stages[action.stage].stage.rank:
                array = jax.device_put(array, target.sharding)
                size = sum(x.nbytes for x in jax.tree.leaves(array)) // target.mesh.size
                sent.append(Sent(way.value, back, target.stage.rank, size))
            mail[way, back, action.microbatch] = array
        return Played(action, tuple(sent))


def _own_part(held: Arrays, stage: int) -> dict[str, Array]:
    head = f"{stage}/"
    return {key[len(head) :]: array for key, array in held.items() if key.startswith(head)}
