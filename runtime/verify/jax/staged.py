"""What a JAX program of several stages moves in a step, read off its compiled calls and its log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from autopar.lowering.collectives import Row
from autopar.nouns.axes import PIPELINE
from autopar.pipeline.actions import Action, Lists
from autopar.runtime.jax.parallel import StageStep, State, held_of
from autopar.runtime.jax.staged import Pipeline
from autopar.runtime.verify.jax import counting


def issued(
    step: Pipeline, state: State, batch: Any, options: Mapping[str, str] | None = None
) -> list[Row]:
    """The collectives of every place of ``pp`` in one step, and what places send each other.

    Called behind a step, whose log says what was played.
    """
    every: Counter[tuple[str, str, int, str, int]] = Counter()
    played = Counter((one.action.stage, one.action.kind) for one in step.log)
    own = step.apart(state)
    shapes = _Shapes(step, own, batch)
    for stage in step.stages:
        rank = stage.stage.rank
        for function, given, times in shapes.calls(stage, played):
            text = _compiled(function, given, options)
            for row in counting.collectives(text, stage.layout.mesh):
                every[row.kind, row.axis, row.size_bytes, row.what, rank] += times * row.count
    for one in step.log:
        source = step.stages[one.action.stage].stage.rank
        for name, back, target, size in one.sent:
            what = f"d {name}" if back else name
            every["send", PIPELINE, size, f"{what} sent", source] += 1
            every["recv", PIPELINE, size, f"{what} received", target] += 1
    places = len({stage.stage.rank for stage in step.stages})
    for name, ranks, size in step.ties.over:
        axis = PIPELINE if len(ranks) == places else f"pp[{','.join(map(str, sorted(ranks)))}]"
        for rank in ranks:
            every["all_reduce", axis, size, f"{name} tie", rank] += 1
    return [
        Row(kind, axis, size, count, what, rank)
        for (kind, axis, size, what, rank), count in sorted(every.items())
    ]


def out_of_order(step: Pipeline, lists: Lists) -> list[str]:
    """One line for each place of ``pp`` that did not play what ``lists`` say, in that order."""
    played: list[list[Action]] = [[] for _ in lists]
    for one in step.log:
        rank = step.stages[one.action.stage].stage.rank
        played[rank].append(Action(one.action.stage, one.action.kind, one.action.microbatch))
    return [
        f"pp {rank}: played {' '.join(map(str, own))} where schedule.txt has "
        f"{' '.join(map(str, wanted))}"
        for rank, (own, wanted) in enumerate(zip(played, lists, strict=True))
        if tuple(own) != tuple(wanted)
    ]


def _compiled(function: Any, given: Sequence[Any], options: Mapping[str, str] | None) -> str:
    lowered = function.lower(*given)
    counting.mark_asked_dtypes(lowered.compiler_ir("stablehlo").operation)
    compiled = lowered.compile(compiler_options=None if options is None else dict(options))
    return str(compiled.as_text())


class _Shapes:
    """What the calls of all stages are given, as shapes: followed from stage to stage."""

    def __init__(self, step: Pipeline, own: Sequence[State], batch: Any) -> None:
        self.step, self.own, self.batch = step, own, batch
        self.values: dict[str, Any] = {}
        self.kept: dict[int, Any] = {}
        for stage in step.stages:
            values, losses, kept = jax.eval_shape(stage.forward, *self._given(stage))
            self.values |= values
            self.kept[stage.number] = losses, kept

    def _given(self, stage: StageStep) -> tuple[Any, ...]:
        n = stage.number
        values = {name: self.values[name] for name in stage.taken}
        return held_of(self.own[n]), self.batch[n], 0, values

    def calls(
        self, stage: StageStep, played: Mapping[tuple[int, str], int]
    ) -> Iterator[tuple[Any, tuple[Any, ...], int]]:
        """(function, what it is given, how often it is called in a step)."""
        n, own = stage.number, self.own[stage.number]
        held, batch, i, values = self._given(stage)
        losses, kept = self.kept[n]
        runs = played[n, "F"]
        gradients = jax.eval_shape(stage.nothing, held)
        needed = {name: values[name] for name in stage.needed}
        readers = Counter(way.value for way in self.step.ways if way.giver == n and way.gradient)
        coming = {name: [self.values[name]] * count for name, count in readers.items()}
        yield stage.forward, (held, batch, i, values), runs
        yield stage.backward, (held, batch, i, needed, kept, coming, gradients), runs
        shares = [losses["loss"]] * runs if "loss" in losses else []
        yield stage.summed, (shares, gradients), 1
        _, reduced = jax.eval_shape(stage.summed, shares, gradients)
        shared: tuple[Any, ...] = ()
        if stage.shared is not None:
            yield stage.shared, (reduced,), 1
            shared = (jax.eval_shape(stage.shared, reduced),)
        yield stage.updated, (own, reduced, *shared), 1
