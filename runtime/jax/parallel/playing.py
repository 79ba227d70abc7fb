"""The actions of a step, played one after another: what each stage runs, and what goes where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from autopar.runtime.jax.parallel.actions import Action, Way
from autopar.runtime.jax.parallel.sends import Sends
from autopar.runtime.jax.parallel.stage_step import StageStep
from autopar.runtime.jax.parallel.tables import LOSS, Array, Arrays, State


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
class Playing:
    """What is there between the actions of a step: of each stage here what it holds and takes,
    losses and gradients so far; outputs by name and microbatch; what is on its way; and what is
    kept of microbatches in flight. ``log``: what was played here."""

    held: Mapping[int, State]
    batch: Mapping[int, Arrays]
    losses: dict[int, list[Array]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[tuple[str, int], Any] = field(default_factory=dict)
    gradients: dict[int, Arrays] = field(default_factory=dict)
    mail: dict[tuple[Way, bool, int], Any] = field(default_factory=dict)
    kept: dict[tuple[int, int], Any] = field(default_factory=dict)
    log: list[Played] = field(default_factory=list)


class Player:
    """Plays ``actions`` on ``stages``, all of the pipeline, of which this process runs those here;
    ``makers``: of each output the first stage that gives it."""

    def __init__(
        self,
        stages: Sequence[StageStep],
        actions: Sequence[Action],
        ways: Sequence[Way],
        makers: Mapping[str, int],
    ) -> None:
        self.stages, self.actions, self.makers = stages, actions, makers
        self.sends = Sends(stages)
        self._into: dict[int, list[Way]] = {n: [] for n in range(len(stages))}
        self._from: dict[int, list[Way]] = {n: [] for n in range(len(stages))}
        for way in ways:
            self._into[way.reader].append(way)
            self._from[way.giver].append(way)

    def play(
        self, held: Mapping[int, State], batch: Mapping[int, Arrays], backward: bool = True
    ) -> Playing:
        """``held`` and ``batch`` by stage; without ``backward`` forwards alone."""
        run = Playing(held, batch)
        if backward:
            run.gradients.update({n: self.stages[n].nothing(own) for n, own in held.items()})
        for action in self.actions:
            made: Arrays | None = None
            if action.kind != "F" and not backward:
                continue
            if self.stages[action.stage].is_here:
                forward = action.kind == "F"
                made = (
                    self._forward(action, run, backward) if forward else self._backward(action, run)
                )
            sent = self.hand_on(action, made, run.mail)
            if made is not None:
                run.log.append(Played(action, sent))
        return run

    def _forward(self, action: Action, run: Playing, backward: bool) -> Arrays:
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

    def _backward(self, action: Action, run: Playing) -> Arrays:
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

    def hand_on(self, action: Action, made: Arrays | None, mail: Any) -> tuple[Sent, ...]:
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
