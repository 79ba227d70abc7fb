"""What a JAX program of several stages moves in a step, read off its compiled calls and its log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from autopar.lowering.collectives import Row
from autopar.nouns.axes import PIPELINE
from autopar.pipeline.actions import Action, Lists
from autopar.runtime.jax.calls import Call, Calls
from autopar.runtime.jax.parallel import State
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
    calls = Calls(step, own, batch)
    for stage in step.stages:
        rank = stage.stage.rank
        for call in calls.of(stage, played):
            text = _compiled(call, options)
            scatters = stage.layout.settings.scatters
            for row in counting.collectives(text, stage.layout.mesh, scatters=scatters):
                every[row.kind, row.axis, row.size_bytes, row.what, rank] += call.times * row.count
    for one in step.log:
        source = step.stages[one.action.stage].stage.rank
        for sent in one.sent:
            what, size = f"d {sent.value}" if sent.gradient else sent.value, sent.size_bytes
            every["send", PIPELINE, size, f"{what} sent", source] += 1
            every["recv", PIPELINE, size, f"{what} received", sent.target] += 1
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
        played[rank].append(Action.parse(str(one.action)))
    return [
        f"pp {rank}: played {' '.join(map(str, own))} where schedule.txt has "
        f"{' '.join(map(str, wanted))}"
        for rank, (own, wanted) in enumerate(zip(played, lists, strict=True))
        if tuple(own) != tuple(wanted)
    ]


def _compiled(call: Call, options: Mapping[str, str] | None) -> str:
    lowered = call.function.lower(*call.given)
    return str(counting.compiled_as_asked(lowered, options).as_text())
