"""The jitted calls of a JAX pipeline as shapes, to ask the compiler what they move and hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from autopar.runtime.jax.parallel import LOSS, StageStep, State, held_of
from autopar.runtime.jax.staged import Pipeline


@dataclass(frozen=True, slots=True)
class Call:
    """A jitted function, the shapes that it is given, and how often it is called in a step."""

    name: str
    function: Any
    given: tuple[Any, ...]
    times: int

    def memory(self) -> Any:
        """XLA's account of it on one device; of what was called before nothing is compiled."""
        return self.function.lower(*self.given).compile().memory_analysis()


class Calls:
    """The calls of the stages here in a step, from states and a cut batch: what one stage gives is
    followed to the next; what comes of other processes is as ``model.py`` has it."""

    def __init__(self, step: Pipeline, own: Mapping[int, State], batch: Any) -> None:
        self.step, self.own, self.batch = step, own, batch
        self.values: dict[str, Any] = {}
        self.kept: dict[int, Any] = {}
        for stage in step.stages:
            if not stage.is_here:
                self.values |= stage.promised()
                continue
            values, losses, kept = jax.eval_shape(stage.forward, *self._given(stage))
            self.values |= values
            self.kept[stage.number] = losses, kept

    def _given(self, stage: StageStep) -> tuple[Any, ...]:
        n = stage.number
        values = {name: self.values[name] for name in stage.taken}
        return held_of(self.own[n]), self.batch[n], 0, values

    def of(self, stage: StageStep, played: Mapping[tuple[int, str], int]) -> Iterator[Call]:
        """Those of one stage; ``played``: how often each kind of action."""
        n, own = stage.number, self.own[stage.number]
        held, batch, i, values = self._given(stage)
        losses, kept = self.kept[n]
        runs = played[n, "F"]
        gradients = jax.eval_shape(stage.nothing, held)
        needed = {name: values[name] for name in stage.needed}
        readers = Counter(way.value for way in self.step.ways if way.giver == n and way.gradient)
        coming = {name: [self.values[name]] * count for name, count in readers.items()}
        yield Call("forward", stage.forward, (held, batch, i, values), runs)
        back = held, batch, i, needed, kept
        whole = runs - (played[n, "I"] if stage.splits else 0)
        if whole:
            yield Call("backward", stage.backward, (*back, coming, gradients), whole)
        if whole < runs:
            _, later = jax.eval_shape(stage.backward_input, *back, coming)
            yield Call("backward_input", stage.backward_input, (*back, coming), runs - whole)
            pending = stage.pending(back[:3], back[3:])
            given = *back[:3], *pending, later, gradients
            yield Call("backward_weight", stage.backward_weight, given, runs - whole)
        shares = [losses[LOSS]] * runs if LOSS in losses else []
        yield Call("summed", stage.summed, (shares, gradients), 1)
        _, reduced = jax.eval_shape(stage.summed, shares, gradients)
        totals: tuple[Any, ...] = ()
        if stage.totals is not None:
            yield Call("totals", stage.totals, (reduced,), 1)
            totals = (jax.eval_shape(stage.totals, reduced),)
        yield Call("updated", stage.updated, (own, reduced, *totals), 1)
