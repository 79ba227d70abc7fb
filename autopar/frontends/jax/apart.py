"""A jaxpr in two: what follows from random keys alone, and all that reads it.

`Apart` goes through the equations once for either part. What the second part reads of the first is
``needed``: arrays of random numbers, in the order in which they are read first. Calls are inlined
where both parts are in them, a scan becomes a scan of each part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend import source_info_util

from autopar.frontends.jax.derivatives import CUSTOM
from autopar.frontends.jax.errors import RandomKeys
from autopar.frontends.jax.inputs import is_key
from autopar.frontends.jax.places import place_of, traceback_of
from autopar.frontends.jax.precision import CALLS, inner_jaxprs
from autopar.frontends.jax.primitives import ELEMENTWISE

_CHEAP = frozenset((*ELEMENTWISE, "convert_element_type", "broadcast_in_dim", "reshape", "squeeze"))
"""What the reading part does again where it is given the smaller operand."""


@dataclass(eq=False, slots=True)
class Drawn:
    """What follows from keys alone, or would with constants; ``value`` where it is computed.

    made:   the equation and operands of a cheap op that made it of one such value.
    pieces: of a stack of the steps of a scan, its rows.
    """

    aval: Any
    value: Any = None
    made: tuple[Any, Sequence[Any]] | None = None
    pieces: tuple[Drawn, ...] = ()

    @property
    def is_key(self) -> bool:
        return is_key(self.aval)

    @property
    def bytes(self) -> int:
        return int(math.prod(self.aval.shape) * self.aval.dtype.itemsize)


@dataclass(eq=False, slots=True)
class Data:
    """What depends on parameters or data; ``value`` where it is computed."""

    value: Any = None


@dataclass(slots=True)
class Apart:
    """One walk. Anything that is neither `Drawn` nor `Data` is a constant, and computed always.

    drawing: computes what is drawn.
    given:   the arrays that are ``needed``, with which it computes the rest; None: it does not.
    """

    drawing: bool = False
    given: Sequence[Any] | None = None
    needed: list[Drawn] = field(default_factory=list)
    _numbers: dict[Drawn, Any] = field(default_factory=dict)

    def run(self, jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr, each of a kind as the operands are."""
        known: dict[Any, Any] = {}
        known.update(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            known.update(
                zip(eqn.outvars, self._equation(eqn, list(map(read, eqn.invars))), strict=True)
            )
        return list(map(read, jaxpr.outvars))

    def number(self, x: Any) -> Any:
        """The array that ``x`` is to what computes with data; None where that is not computed."""
        if isinstance(x, Data):
            return x.value
        if not isinstance(x, Drawn):
            return x
        if x not in self._numbers:
            self._numbers[x] = self._array(x)
        return self._numbers[x]

    def _array(self, x: Drawn) -> Any:
        if x.pieces:
            rows = [self.number(piece) for piece in x.pieces]
            return None if self.given is None else jnp.stack(rows)
        if x.made is not None and _least(x) is not x:
            eqn, operands = x.made
            values = [self.number(v) for v in operands]
            return None if self.given is None else bound(eqn, values)[0]
        self.needed.append(x)
        if self.given is None:
            return None
        return jnp.asarray(self.given[len(self.needed) - 1]).astype(x.aval.dtype)

    def _equation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        draws = any(isinstance(x, Drawn) for x in inputs) or is_random(eqn)
        if not any(isinstance(x, Data) for x in inputs):
            if not draws:
                return bound(eqn, inputs)
            own = [x.value if isinstance(x, Drawn) else x for x in inputs]
            values = bound(eqn, own) if self.drawing else [None] * len(eqn.outvars)
            cheap = eqn.primitive.name in _CHEAP
            cheap &= sum(isinstance(x, Drawn) and not x.is_key for x in inputs) == 1
            made = (eqn, inputs) if cheap else None
            return [
                Drawn(v.aval, value, made) for v, value in zip(eqn.outvars, values, strict=True)
            ]
        name = eqn.primitive.name
        if draws and name in CALLS and name not in CUSTOM:
            called = eqn.params[CALLS[name]]
            if isinstance(called, jex.ClosedJaxpr):
                return self.run(called.jaxpr, called.consts, inputs)
            return self.run(called, (), inputs)
        if draws and name == "scan":
            return self._scan(eqn, inputs)
        if is_random(eqn) and name in ("cond", "while"):
            raise RandomKeys(
                f"{place_of(eqn)}: random numbers are drawn inside of a {name}: draw them before "
                "it, and give them to its bodies"
            )
        if is_random(eqn):
            raise RandomKeys(
                f"{place_of(eqn)}: a random key or a random number is made from parameters or data "
                f"({name}): make keys from the batch's keys, its single integers and constants "
                "alone, as in jax.random.fold_in(batch['key'], batch['step']), or where the batch "
                "is made"
            )
        if any(isinstance(x, Drawn) and x.is_key for x in inputs):
            raise RandomKeys(
                f"{place_of(eqn)}: {name} takes a random key beside parameters or data: draw the "
                "numbers first, and compute with those"
            )
        values = [self.number(x) for x in inputs]
        results = [None] * len(eqn.outvars) if self.given is None else bound(eqn, values)
        return list(map(Data, results))

    def _scan(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        """A scan of what is drawn, whose numbers of all steps a scan of the rest reads."""
        scan = _Scan.of(eqn, inputs)
        numbers = {i: self.number(inputs[i]) for i in scan.read_before}
        drawn, kept, drawn_rows = scan.draw() if self.drawing else (None, None, None)
        rows = []
        for place, own in enumerate(scan.own):
            values = [None if kept is None else kept[place][i] for i in range(scan.length)]
            pieces = tuple(Drawn(own.aval, value) for value in values)
            shape = (scan.length, *own.aval.shape)
            stack = Drawn(jax.ShapeDtypeStruct(shape, own.aval.dtype), pieces=pieces)
            rows.append(self.number(stack))
        made, made_rows = (None, None) if self.given is None else scan.rest(numbers, rows)
        results: list[Any] = []
        sides = [
            [iter(carries or ()), iter(stacked or ())]
            for carries, stacked in ((made, made_rows), (drawn, drawn_rows))
        ]
        for place, (var, is_data) in enumerate(zip(eqn.outvars, scan.gives_data, strict=True)):
            value = next(sides[not is_data][place >= scan.carried], None)
            results.append(Data(value) if is_data else Drawn(var.aval, value))
        return results


@dataclass(frozen=True, slots=True)
class _Scan:
    """A scan over ``inputs``: constants, ``carried`` ones, rows.

    data:        of each input, whether it depends on parameters or data in any step.
    needed:      what a step of the rest reads of what is drawn: an input of the scan at a place of
                 ``fixed``, or one of ``own``, drawn in the step.
    gives_data:  of each result.
    """

    eqn: Any
    inputs: Sequence[Any]
    data: Sequence[bool]
    fixed: Sequence[int | None] = ()
    own: Sequence[Drawn] = ()
    gives_data: Sequence[bool] = ()

    @staticmethod
    def of(eqn: Any, inputs: Sequence[Any]) -> _Scan:
        data = [isinstance(x, Data) for x in inputs]
        first, carried = eqn.params["num_consts"], eqn.params["num_carry"]
        while True:
            scan, probe = _Scan(eqn, inputs, data), Apart()
            given, made = scan.step(probe, {})
            grown = [isinstance(x, Data) for x in made]
            if grown[:carried] == data[first : first + carried]:
                break
            data = [*data[:first], *grown[:carried], *data[first + carried :]]
        places = {x: i for i, x in enumerate(given[:first]) if isinstance(x, Drawn)}
        fixed = [places.get(x) for x in probe.needed]
        own = [x for x in probe.needed if x not in places]
        return _Scan(eqn, inputs, data, fixed, own, grown)

    @property
    def length(self) -> int:
        return int(self.eqn.params["length"])

    @property
    def consts(self) -> int:
        return int(self.eqn.params["num_consts"])

    @property
    def carried(self) -> int:
        return int(self.eqn.params["num_carry"])

    @property
    def read_before(self) -> list[int]:
        """Places of the inputs that the rest reads from the first step on."""
        carries = range(self.consts, self.consts + self.carried)
        every = [*(i for i in carries if self.data[i]), *(i for i in self.fixed if i is not None)]
        return list(dict.fromkeys(every))

    def step(self, walk: Apart, values: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """What one step is given and makes, with ``values`` by the place of the input."""
        body = self.eqn.params["jaxpr"]
        given: list[Any] = []
        for i, (x, var) in enumerate(zip(self.inputs, body.jaxpr.invars, strict=True)):
            if self.data[i]:
                given.append(Data(values.get(i)))
            elif i < self.consts and not isinstance(x, Drawn):
                given.append(x)
            else:
                given.append(Drawn(var.aval, values.get(i)))
        made = walk.run(body.jaxpr, body.consts, given)
        for i, x in enumerate(made):
            data = self.data[self.consts + i] if i < self.carried else not isinstance(x, Drawn)
            if data and not isinstance(x, Data):
                made[i] = Data(walk.number(x))
        return given, made

    def draw(self) -> tuple[Any, Any, Any]:
        """What is drawn: carries after the last step, and rows of ``own`` and of results."""
        consts = enumerate(self.inputs[: self.consts])
        known = {i: x.value for i, x in consts if isinstance(x, Drawn)}

        def run(carry: Any, row: Any) -> Any:
            walk = Apart(drawing=True)
            given, made = self.step(walk, {**known, **carry, **row})
            outer = set(filter(_is_drawn, given[: self.consts]))
            kept = [x.value for x in walk.needed if x not in outer]
            results = [_value(x) for x in made[self.carried :] if not isinstance(x, Data)]
            return {i: _value(made[i - self.consts]) for i in carry}, (kept, results)

        carry, rows = self._operands(False, {i: _value(x) for i, x in enumerate(self.inputs)})
        last, (kept, results) = self._scanned(run, carry, rows)
        return list(last.values()), kept, results

    def rest(self, numbers: Mapping[int, Any], own: Sequence[Any]) -> tuple[Any, Any]:
        """All that is not: carries after the last step, and rows of results."""
        values = {i: x.value for i, x in enumerate(self.inputs) if isinstance(x, Data)}
        known = {i: v for i, v in values.items() if i < self.consts}

        def run(carry: Any, row: Any) -> Any:
            data, drawn = row
            each = iter(drawn)
            read = [next(each) if i is None else numbers[i] for i in self.fixed]
            _, made = self.step(Apart(given=read), {**known, **carry, **data})
            results = [x.value for x in made[self.carried :] if isinstance(x, Data)]
            return {i: made[i - self.consts].value for i in carry}, results

        carry, rows = self._operands(True, {**values, **numbers})
        last, results = self._scanned(run, carry, (rows, list(own)))
        return list(last.values()), results

    def _operands(self, data: bool, values: Mapping[int, Any]) -> tuple[Any, Any]:
        """Carries and rows of one side, by place, in the dtypes of the body."""
        of = [i for i in range(self.consts, len(self.inputs)) if self.data[i] == data]
        end = self.consts + self.carried
        types = self.eqn.params["jaxpr"].jaxpr.invars
        carry = {i: values[i] for i in of if i < end}
        carry = {
            i: v if is_key(types[i].aval) else jnp.asarray(v, types[i].aval.dtype)
            for i, v in carry.items()
        }
        return carry, {i: values[i] for i in of if i >= end}

    def _scanned(self, run: Any, carry: Any, rows: Any) -> Any:
        how = {"length": self.length, "reverse": self.eqn.params["reverse"]}
        return jax.lax.scan(run, carry, rows, **how)


def is_random(eqn: Any) -> bool:
    """Whether an equation makes random keys or numbers, or calls what does."""
    if eqn.primitive.name.startswith("random_"):
        return True
    return any(is_random(e) for inner in inner_jaxprs(eqn) for e in inner.eqns)


def _is_drawn(x: Any) -> bool:
    return isinstance(x, Drawn)


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Drawn) else x


def _least(x: Drawn) -> Drawn:
    """The smallest of ``x`` and what cheap ops made it of; of equal ones the last."""
    least = x
    while x.made is not None:
        x = next(v for v in x.made[1] if isinstance(v, Drawn))
        if x.bytes < least.bytes:
            least = x
    return least


def bound(eqn: Any, values: Sequence[Any], caller: Any = None) -> list[Any]:
    """The results of an equation, with its place in the user's code; ``caller``: the traceback of
    the call that it is in."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    place = source_info_util.user_context(traceback_of(eqn, caller), name_stack=stack)
    with place, eqn.ctx.manager:
        made = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(made) if eqn.primitive.multiple_results else [made]
