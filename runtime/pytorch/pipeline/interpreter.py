"""Plays the actions of one rank: takes what an action needs, runs it, sends what it made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from autopar.pipeline.actions import Action
from autopar.runtime.pytorch.phases import Stopwatch
from autopar.runtime.pytorch.pipeline.edges import Edge
from autopar.runtime.pytorch.pipeline.log import Played, Sent
from autopar.runtime.pytorch.pipeline.mail import Mail, Undelivered
from autopar.runtime.pytorch.pipeline.stage_run import StageRun
from autopar.runtime.pytorch.portions import shapes_of
from autopar.runtime.shared.settings import ProgramError

KINDS = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "of the weights"}


class Interpreter:
    """One rank's actions; ``runs``: its stages by number, ``gradients``: whether an edge has a way
    back; ``seed(stage, microbatch)`` sets random numbers; ``ended(stage)``: its last backward."""

    def __init__(
        self,
        actions: Sequence[Action],
        runs: Mapping[int, StageRun],
        edges: Sequence[Edge],
        gradients: Sequence[bool],
        mail: Mail,
        seed: Callable[[int, int], None],
        ended: Callable[[int], None],
    ) -> None:
        self.actions = actions
        self.runs = runs
        self.mail = mail
        self.edges, self.gradients = edges, gradients
        self._seed, self._ended = seed, ended
        self._into: dict[int, dict[str, int]] = {n: {} for n in runs}
        self._from: dict[int, list[int]] = {n: [] for n in runs}
        for number, edge in enumerate(edges):
            if edge.reader in runs:
                self._into[edge.reader][edge.value] = number
            if edge.giver in runs:
                self._from[edge.giver].append(number)
        self.settle()
        self._here: dict[tuple[int, str, int], Tensor] = {}
        self.log: list[Played] = []
        self.doing: Action | None = None
        self.tell: Callable[[str], None] = lambda doing: None
        self.most_held = 0

    def settle(self) -> None:
        """Which action ends a stage's gradients; again where a stage's backward changes."""
        self._last = {
            a.stage: i
            for i, a in enumerate(self.actions)
            if a.kind in ("BI" if self.runs[a.stage].whole_backward else "BIW")
        }

    def play(self, ready: Sequence[Mapping[str, Any]], loss: Tensor, watch: Stopwatch) -> Tensor:
        """All actions; ``loss`` and what stages added to it. ``ready``: the local microbatches.

        Raises `PipelineStopped` where another rank is gone.
        """
        self.log = []
        self.most_held = 0
        self.mail.shapes = [shapes_of(microbatch) for microbatch in ready]
        try:
            for number, action in enumerate(self.actions):
                self.doing = action
                self.tell(words_of(action))
                share = self._one(number, action, ready, watch)
                if share is not None:
                    loss = loss + share
            self.mail.finish()
        except Undelivered as error:
            raise self._stopped(error) from error
        self.doing = None
        self.tell("")
        return loss

    def _one(
        self,
        number: int,
        action: Action,
        ready: Sequence[Mapping[str, Any]],
        watch: Stopwatch,
    ) -> Tensor | None:
        start = time.perf_counter()
        self.mail.post(number)
        share: Tensor | None = None
        if action.kind == "F":
            made, share = self._forward(action, ready[action.microbatch])
            watch.lap("forward")
        else:
            made = self._backward(action, number)
            watch.lap("backward")
        sent = self._hand_on(number, action, made)
        self.log.append(Played(action, sent, start, time.perf_counter()))
        self.most_held = max(self.most_held, sum(run.held for run in self.runs.values()))
        if number == self._last.get(action.stage):
            self._ended(action.stage)
        return share

    def _forward(
        self, action: Action, piece: Mapping[str, Any]
    ) -> tuple[dict[tuple[int, str], Tensor], Tensor | None]:
        stage, _, i = action
        run = self.runs[stage]
        inputs: dict[str, Any] = {}
        for name in run.stage.takes:
            if name in self._into[stage]:
                edge = self._into[stage][name]
                inputs[name] = self._take(edge, "value", i).requires_grad_(self.gradients[edge])
            elif name in piece:
                inputs[name] = piece[name]
            else:
                raise ProgramError(
                    f"stage {stage} takes {name!r}: the batch has {', '.join(map(repr, piece))}, "
                    "and no stage before it gives that"
                )
        self._seed(stage, i)
        given, loss = run.forward(i, inputs, piece)
        return {(n, "value"): given[self.edges[n].value] for n in self._from[stage]}, loss

    def _backward(self, action: Action, number: int) -> dict[tuple[int, str], Tensor]:
        stage, kind, i = action
        run = self.runs[stage]
        last = number == self._last.get(stage)
        if kind == "W":
            run.backward_weight(i, last)
            return {}
        coming: dict[str, Tensor] = {}
        for edge in self._from[stage]:
            if self.gradients[edge]:
                gradient = self._take(edge, "gradient", i)
                value = self.edges[edge].value
                coming[value] = coming[value] + gradient if value in coming else gradient
        back = (run.backward if kind == "B" else run.backward_input)(i, coming, last)
        ways = self._into[stage].items()
        return {(n, "gradient"): back[name] for name, n in ways if self.gradients[n]}

    def _take(self, edge: int, kind: str, i: int) -> Tensor:
        here = self._here.pop((edge, kind, i), None)
        return self.mail.take(edge, kind, i) if here is None else here

    def _hand_on(
        self, number: int, action: Action, made: Mapping[tuple[int, str], Tensor]
    ) -> tuple[Sent, ...]:
        messages = self.mail.send(number, made)
        gone = {(m.edge, m.kind) for m in messages}
        for (edge, kind), tensor in made.items():
            if (edge, kind) not in gone:
                kept = tensor.detach() if kind == "value" else tensor
                self._here[edge, kind, action.microbatch] = kept
        return tuple(
            Sent(
                self.edges[m.edge].value,
                m.kind == "gradient",
                m.microbatch,
                m.target,
                made[m.edge, m.kind].nbytes,
            )
            for m in messages
        )

    def _stopped(self, error: Undelivered) -> PipelineStopped:
        message = error.message
        way = self.edges[message.edge]
        sending = message.source == self.mail.rank
        other = way.reader if (message.kind == "value") == sending else way.giver
        return PipelineStopped(
            f"{words_of(self.doing)}: {'the gradient of ' if message.kind == 'gradient' else ''}"
            f"{way.value} of microbatch {message.microbatch} "
            f"{'did not go to' if sending else 'did not come from'} stage {other} (pipeline rank "
            f"{message.target if sending else message.source}), whose process is gone or hangs: "
            f"{' '.join(str(error).split())[:160]}. Start again from the last checkpoint"
        )


class PipelineStopped(RuntimeError):
    """A rank of the pipeline is gone; the text says what this one waited for."""


def words_of(action: Action | None) -> str:
    """``2F3 (stage 2, forward of microbatch 3)``; empty between steps."""
    if action is None:
        return ""
    stage, kind, i = action
    return f"{action} (stage {stage}, {KINDS[kind]} of microbatch {i})"


__all__ = ["Interpreter", "PipelineStopped", "words_of"]
