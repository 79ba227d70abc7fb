"""A backward pass in two: first the gradients of what a stage took, later those of its parameters.

Qi et al. 2023 (zero bubble), 2. Of the equations of a pass, the first half runs those that the
gradients to be sent depend on, the second all others. What the second half reads of the first is
kept between, where it depends on the gradients that came; all else it makes again from what the
forward pass kept. So no product runs twice. In a loop over layers that holds for each layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from autopar.runtime.jax.parallel.tables import Array

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "remat2")
Later = dict[str, Any]
"""What the first half keeps for the second: ``kept`` results, and of a loop such a dict of rows,
by the number of its equation."""


@dataclass(frozen=True)
class Loop:
    """A `lax.scan` with parts in both halves: by place, the results that each of them makes, and
    the inputs that the first one ``takes``."""

    body: Halves
    first: tuple[int, ...]
    second: tuple[int, ...]
    takes: tuple[int, ...]


@dataclass(frozen=True)
class Halves:
    """A pass. first, second: numbers of the equations of each half. kept: what the second half is
    given of the first. reads: places of the inputs that it reads beside. loops: by number.
    wanted, others: places of the outputs of each half."""

    jaxpr: Any
    consts: Sequence[Any]
    first: frozenset[int]
    second: frozenset[int]
    kept: tuple[Any, ...]
    reads: tuple[int, ...]
    loops: Mapping[int, Loop]
    wanted: tuple[int, ...]
    others: tuple[int, ...]

    def run_first(self, given: Mapping[int, Array]) -> tuple[list[Array], Later]:
        """The outputs that are wanted, from inputs by place, and what is kept."""
        values = self._start(given)
        later: Later = {}
        for number in sorted(self.first):
            eqn = self.jaxpr.eqns[number]
            if number in self.loops:
                made, later[str(number)] = _first_loop(self.loops[number], eqn, values)
                values |= made
            else:
                values |= _equation(eqn, values)
        later["kept"] = [values[v] for v in self.kept]
        return [_value(self.jaxpr.outvars[place], values) for place in self.wanted], later

    def run_second(self, given: Mapping[int, Array], later: Later) -> list[Array]:
        """The other outputs."""
        values = self._start(given) | dict(zip(self.kept, later["kept"], strict=True))
        for number in sorted(self.second):
            eqn = self.jaxpr.eqns[number]
            if number in self.loops:
                values |= _second_loop(self.loops[number], eqn, values, later[str(number)])
            else:
                values |= _equation(eqn, values)
        return [_value(self.jaxpr.outvars[place], values) for place in self.others]

    def _start(self, given: Mapping[int, Array]) -> dict[Any, Array]:
        values = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        return values | {self.jaxpr.invars[place]: x for place, x in given.items()}


def halves(function: Any, given: Sequence[Any], moved: Collection[int], wanted: int) -> Halves:
    """``function`` of the flat arrays ``given``, whose first ``wanted`` outputs come first;
    ``moved``: places of the inputs that the second half is not given."""
    closed = _without_calls(jax.make_jaxpr(function)(*given))
    others = range(wanted, len(closed.jaxpr.outvars))
    return _halves(closed, frozenset(moved), frozenset(moved), range(wanted), others)


def _halves(
    closed: Any,
    moved: frozenset[int],
    held: frozenset[int],
    wanted: Collection[int],
    others: Collection[int],
) -> Halves:
    """``moved``: places of inputs that depend on gradients. ``held``: and of those that the second
    half is not given either."""
    jaxpr = closed.jaxpr
    dependent = {jaxpr.invars[place] for place in moved}
    for eqn in jaxpr.eqns:
        dependent |= _dependent(eqn, dependent)
    first: dict[int, set[int]] = {}  # of each equation the places of what it makes
    needed = _variables(jaxpr.outvars[place] for place in wanted)
    for number, eqn in reversed([*enumerate(jaxpr.eqns)]):
        places = {i for i, v in enumerate(eqn.outvars) if v in needed}
        if places:
            first[number], inputs = _made(eqn, places)
            needed |= _variables(eqn.invars[i] for i in inputs)
    needed = _variables(jaxpr.outvars[place] for place in others)
    given = {jaxpr.invars[place] for place in held}
    kept: dict[Any, None] = {}
    second: set[int] = set()
    loops: dict[int, Loop] = {}
    for number, eqn in reversed([*enumerate(jaxpr.eqns)]):
        places = {i for i, v in enumerate(eqn.outvars) if v in needed}
        here = {i for i in first.get(number, ()) if eqn.outvars[i] in dependent}
        kept |= dict.fromkeys(eqn.outvars[i] for i in sorted(places & here))
        rest = places - here
        if eqn.primitive.name == "scan" and number in first and here:
            loop = _loop(eqn, dependent, first[number], rest)
            loops[number] = loop
        if rest:
            every = range(len(eqn.invars))
            reads = loops[number].body.reads if number in loops else every
            second.add(number)
            needed |= _variables(eqn.invars[i] for i in reads)
    kept |= dict.fromkeys(v for v in jaxpr.invars if v in needed and v in given)
    asked = [i for i, v in enumerate(jaxpr.invars) if v in needed and v not in given]
    return Halves(
        jaxpr, closed.consts, frozenset(first), frozenset(second), tuple(kept), tuple(asked),
        loops, tuple(wanted), tuple(others),
    )  # fmt: skip


def _loop(eqn: Any, dependent: set[Any], first: set[int], rest: set[int]) -> Loop:
    """The halves of a loop, of which the first makes the results ``first``, and the second, of
    those that it is to make, ``rest`` with the carries that it goes on from."""
    closed, (consts, carries) = eqn.params["jaxpr"], _counts(eqn)
    moved = _moved_inside(eqn, dependent)
    carried = range(consts, consts + carries)
    held = frozenset(i for i in moved if i not in carried) | {
        consts + i for i in first if i < carries
    }
    while True:
        body = _halves(closed, moved, held, sorted(first), sorted(rest))
        more = {i - consts for i in body.reads if consts <= i < consts + carries} - rest
        if not more:
            takes = tuple(sorted(_made(eqn, first)[1]))
            return Loop(body, tuple(sorted(first)), tuple(sorted(rest)), takes)
        rest = rest | more


def _first_loop(loop: Loop, eqn: Any, values: Mapping[Any, Array]) -> tuple[Any, Later]:
    consts, carries = _counts(eqn)
    own = [place for place in loop.first if place < carries]
    fixed, rows = _inputs(eqn, values, loop.takes)

    def step(carry: list[Array], row: dict[int, Array]) -> tuple[list[Array], Any]:
        given = fixed | row | {consts + place: x for place, x in zip(own, carry, strict=True)}
        made, later = loop.body.run_first(given)
        return made[: len(own)], (made[len(own) :], later)

    start = [_value(eqn.invars[consts + place], values) for place in own]
    last, (more, later) = _scanned(eqn, step, start, rows)
    return _results(eqn, loop.first, [*last, *more]), later


def _second_loop(
    loop: Loop, eqn: Any, values: Mapping[Any, Array], later: Later
) -> dict[Any, Array]:
    consts, carries = _counts(eqn)
    own = [place for place in loop.second if place < carries]
    fixed, rows = _inputs(eqn, values, loop.body.reads)

    def step(carry: list[Array], row: Any) -> tuple[list[Array], list[Array]]:
        given = fixed | row[0] | {consts + place: x for place, x in zip(own, carry, strict=True)}
        made = loop.body.run_second(given, row[1])
        return made[: len(own)], made[len(own) :]

    start = [_value(eqn.invars[consts + place], values) for place in own]
    last, more = _scanned(eqn, step, start, (rows, later))
    return _results(eqn, loop.second, [*last, *more])


def _inputs(
    eqn: Any, values: Mapping[Any, Array], places: Collection[int]
) -> tuple[dict[int, Array], dict[int, Array]]:
    """Of ``places`` those that are the same in each turn, and those of which each has a row."""
    consts, carries = _counts(eqn)
    fixed = {i: _value(eqn.invars[i], values) for i in places if i < consts}
    rows = {i: _value(eqn.invars[i], values) for i in places if i >= consts + carries}
    return fixed, rows


def _scanned(eqn: Any, step: Any, start: Any, rows: Any) -> Any:
    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return lax.scan(step, start, rows, **how)


def _results(eqn: Any, places: Sequence[int], made: Sequence[Array]) -> dict[Any, Array]:
    return {eqn.outvars[place]: x for place, x in zip(places, made, strict=True)}


def _counts(eqn: Any) -> tuple[int, int]:
    """How many inputs of a loop are the same in each turn, and how many are carried."""
    return eqn.params["num_consts"], eqn.params["num_carry"]


def _made(eqn: Any, places: set[int]) -> tuple[set[int], set[int]]:
    """Places of what is made where ``places`` are, and of the inputs that takes."""
    if eqn.primitive.name != "scan":
        return set(range(len(eqn.outvars))), set(range(len(eqn.invars)))
    closed, (consts, carries) = eqn.params["jaxpr"], _counts(eqn)
    while True:
        inputs = _read_by(closed.jaxpr, places)
        more = {i - consts for i in inputs if consts <= i < consts + carries} - places
        if not more:
            return places, inputs
        places = places | more


def _read_by(jaxpr: Any, places: Collection[int]) -> set[int]:
    """Places of the inputs that outputs take."""
    needed = _variables(jaxpr.outvars[place] for place in places)
    for eqn in reversed(jaxpr.eqns):
        here = {i for i, v in enumerate(eqn.outvars) if v in needed}
        if here:
            needed |= _variables(eqn.invars[i] for i in _made(eqn, here)[1])
    return {i for i, v in enumerate(jaxpr.invars) if v in needed}


def _dependent(eqn: Any, dependent: set[Any]) -> set[Any]:
    """What an equation makes that depends on what is ``dependent``."""
    inputs = _variables(eqn.invars)
    if eqn.primitive.name != "scan" or inputs.isdisjoint(dependent):
        return set() if inputs.isdisjoint(dependent) else set(eqn.outvars)
    inside = _dependent_inside(eqn, _moved_inside(eqn, dependent))
    outs = eqn.params["jaxpr"].jaxpr.outvars
    return {v for v, own in zip(eqn.outvars, outs, strict=True) if _is_in(own, inside)}


def _moved_inside(eqn: Any, dependent: set[Any]) -> frozenset[int]:
    """Places of a body's inputs that depend on what is ``dependent`` outside, in any turn."""
    closed, (consts, carries) = eqn.params["jaxpr"], _counts(eqn)
    moved = {i for i, v in enumerate(eqn.invars) if _is_in(v, dependent)}
    while True:
        inside = _dependent_inside(eqn, moved)
        outs = closed.jaxpr.outvars[:carries]
        more = {consts + i for i, v in enumerate(outs) if _is_in(v, inside)} - moved
        if not more:
            return frozenset(moved)
        moved |= more


def _dependent_inside(eqn: Any, moved: Collection[int]) -> set[Any]:
    jaxpr = eqn.params["jaxpr"].jaxpr
    inside = {jaxpr.invars[i] for i in moved}
    for one in jaxpr.eqns:
        inside |= _dependent(one, inside)
    return inside


def _without_calls(closed: Any) -> Any:
    """``closed`` with the equations of what it calls in place of the calls, in loops too."""
    flat = jax.make_jaxpr(lambda *given: _inlined(closed.jaxpr, closed.consts, given))
    return flat(*closed.in_avals)


def _inlined(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CALLS:
            inner = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
            body = getattr(inner, "jaxpr", inner)
            own = [_value(v, values) for v in eqn.invars]
            made = _inlined(body, getattr(inner, "consts", ()), own)
            values |= dict(zip(eqn.outvars, made, strict=True))
        elif eqn.primitive.name == "scan":
            body = _without_calls(eqn.params["jaxpr"])
            values |= _equation(eqn.replace(params={**eqn.params, "jaxpr": body}), values)
        else:
            values |= _equation(eqn, values)
    return [_value(v, values) for v in jaxpr.outvars]


def _equation(eqn: Any, values: Mapping[Any, Array]) -> dict[Any, Array]:
    given = [_value(v, values) for v in eqn.invars]
    made = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(eqn.params))
    results = made if eqn.primitive.multiple_results else [made]
    return dict(zip(eqn.outvars, results, strict=True))


def _value(variable: Any, values: Mapping[Any, Array]) -> Array:
    return variable.val if isinstance(variable, Literal) else values[variable]


def _variables(some: Any) -> set[Any]:
    return {v for v in some if not isinstance(v, Literal)}


def _is_in(variable: Any, some: Collection[Any]) -> bool:
    return not isinstance(variable, Literal) and variable in some
