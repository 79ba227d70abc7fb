"""From a jaxpr to a draft: calls inlined, scans kept where they are blocks or long.

A scan is a block when its stacked operands are parameters and it gives back only its carries. One
over time is an op with a body (`autopar.frontends.jax.time_scans`), a short one is written out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import jax.extend.core as jex
import numpy as np

from autopar.frontends.jax.branches import looped, only_branch, switched
from autopar.frontends.jax.constants import Constants, is_data
from autopar.frontends.jax.copied_masks import made_again
from autopar.frontends.jax.derivatives import (
    CUSTOM,
    SOLVE,
    Rules,
    body_of,
    function_of,
    known_kind,
    name_of,
    rule_failed,
)
from autopar.frontends.jax.draft import Builder, Draft, Node, Operand, Uniform, Value
from autopar.frontends.jax.errors import ComplexNumbers, LargeConstant
from autopar.frontends.jax.known_arrays import made_of_places
from autopar.frontends.jax.known_numbers import (
    COMPLEX,
    exact_number,
    is_one_number,
    literal_of,
    plain,
)
from autopar.frontends.jax.own_casts import OwnCasts
from autopar.frontends.jax.places import frames_of, scope_of
from autopar.frontends.jax.precision import CALLS
from autopar.frontends.jax.primitives import convert
from autopar.frontends.jax.time_scans import MOST_STEPS, scanned
from autopar.nouns.graph import Source
from autopar.nouns.kinds import OWN_DERIVATIVE

MOST_ELEMENTS = 1 << 16  # of a closed-over array
NO_CASTS = OwnCasts()


def draft_of(
    closed: Any,
    inputs: Sequence[Operand],
    exact: Mapping[int, float] | None = None,
    rules: Rules | None = None,
    constants: Constants | None = None,
    casts: OwnCasts = NO_CASTS,
    samples: frozenset[int] | None = None,
) -> Draft:
    """The draft of a closed jaxpr whose operands are ``inputs``, in order.

    exact: literals by ``id`` with the value that they had before rounding.
    rules: derivatives that functions have of their own; None where nothing is differentiated, so
           that such functions are what they compute.
    constants: collects arrays that are data; None where all are written.
    casts: what the loss asks for in the precision of the workload.
    samples: how many the batch has, by its entries' first dims; None: those of ``inputs``.
    """
    if samples is None:
        samples = frozenset(x.shape[0] for x in inputs if _is_entry(x))
    walker = _Walker(Builder(), "", Source(), exact or {}, rules, constants, casts, samples)
    consts = [walker.constant(c) for c in closed.consts]
    outputs = walker.run(closed.jaxpr, [*consts, *inputs])
    if rules is None:
        outputs = [walker.builder.tensor(x) for x in outputs]
    values = tuple(x for x in inputs if isinstance(x, Value))
    return Draft(values, tuple(walker.builder.nodes), tuple(outputs))


class _Walker:
    """Evaluates equations into a builder. ``scope`` and ``place`` are those of the caller."""

    def __init__(
        self,
        builder: Builder,
        scope: str,
        place: Source,
        exact: Mapping[int, float],
        rules: Rules | None,
        constants: Constants | None,
        casts: OwnCasts,
        samples: frozenset[int],
    ) -> None:
        self.builder = builder
        self.scope = scope
        self.place = place
        self.exact = exact
        self.rules = rules
        self.constants = constants
        self.casts = casts
        self.samples = samples

    def run(self, jaxpr: Any, operands: Sequence[Operand]) -> list[Operand]:
        known: dict[Any, Operand] = {}
        known.update(zip([*jaxpr.constvars, *jaxpr.invars], operands, strict=True))

        def read(atom: Any) -> Operand:
            if isinstance(atom, jex.Literal):
                literal = literal_of(atom.val, str(atom.aval.dtype))
                return replace(literal, value=self.exact.get(id(atom), literal.value))
            return known[atom]

        made: dict[tuple[Operand, str], Operand] = {}

        def cast(x: Operand, reader: object, place: int) -> Operand:
            for dtype in self.casts.at.get((id(reader), place), ()):
                if (x, dtype) not in made:
                    made[x, dtype] = self._cast(x, dtype)
                x = made[x, dtype]
            return x

        for eqn in jaxpr.eqns:
            inputs = [cast(read(atom), eqn, i) for i, atom in enumerate(eqn.invars)]
            results = self._equation(eqn, inputs)
            known.update(zip(eqn.outvars, results, strict=True))
        return [cast(read(atom), jaxpr, i) for i, atom in enumerate(jaxpr.outvars)]

    def _cast(self, x: Operand, dtype: str) -> Operand:
        """The user's own cast, in the graph of float32: of one dtype to the same."""
        if isinstance(x, Uniform) or x.dtype == dtype != "float32":
            return x
        return self.builder.op("cast", (x,), x.shape, "float32", dtype=dtype, own=True)

    def constant(self, value: Any) -> Operand:
        """A closed-over array: one number, or an op that makes it.

        An array has the numbers that it has, as data do; one number is what was written, so that
        of float32 it is the shortest decimal."""
        array = np.asarray(value)
        if is_one_number(array):
            number = exact_number(array.flat[0]) if array.ndim else plain(array.flat[0])
            return Uniform(number, str(array.dtype), array.shape)
        if (made := made_of_places(array, self.builder)) is not None:
            return made
        if self.constants is not None and is_data(array):
            return self.constants.value(value)
        if array.size > MOST_ELEMENTS:
            raise LargeConstant(
                f"the loss closes over an array {list(array.shape)}, {array.size} elements "
                f"(at most {MOST_ELEMENTS} become part of a program): make it a batch entry, a "
                "parameter, or compute it with jnp inside the function"
            )
        dtype = str(array.dtype)
        values = (array.astype("float64") if "float" in dtype else array).tolist()
        return self.builder.op("constant", (), array.shape, dtype, value=values, dtype=dtype)

    def _equation(self, eqn: Any, inputs: list[Operand]) -> list[Operand]:
        name = eqn.primitive.name
        source = self._source(eqn)
        if name == "cond" and (branch := only_branch(eqn.params, inputs[0])) is not None:
            return self._call(branch, inputs[1:], source)
        self.builder.source = source
        if name in ("cond", "while"):
            if name == "while":
                return [*looped(eqn, inputs, self._drafted, self.builder)]
            return [*switched(eqn, inputs, self._branch, self.builder)]
        if name in (*CUSTOM, SOLVE) and self.rules is not None:
            own = self._own_derivative(eqn, inputs, source, self.rules)
            if own is not None:
                return own
        if name in CALLS or name == SOLVE:
            called = body_of(eqn) if name == SOLVE else eqn.params[CALLS[name]]
            return self._call(called, inputs, source)
        if name == "scan":
            return self._scan(eqn, inputs, source)
        outs = [(tuple(map(int, v.aval.shape)), str(v.aval.dtype)) for v in eqn.outvars]
        if any("complex" in dtype for _, dtype in outs):
            raise ComplexNumbers(f"{source}: {COMPLEX.format(name)}")
        return convert(name, eqn.params, inputs, outs, self.builder)

    def _own_derivative(
        self, eqn: Any, inputs: list[Operand], source: Source, rules: Rules
    ) -> list[Operand] | None:
        """The call as one op with its rule; None where it is what its body computes."""
        if not any(isinstance(x, Value) and "float" in x.dtype for x in inputs):
            return None
        try:
            if kind := known_kind(eqn, rules):
                return [self.builder.op(kind, inputs[:1], inputs[0].shape, inputs[0].dtype)]
            if rules.is_plain(eqn, inputs):
                return None
            backward = rules.backward(eqn)
        except Exception as error:  # the user's rule
            raise rule_failed(eqn, source, error) from error

        made = function_of(eqn, inputs, backward, self._drafted)
        if rules.decide(eqn, made, self._drafted, inputs):
            return None
        outs = tuple(Value(tuple(map(int, v.aval.shape)), str(v.aval.dtype)) for v in eqn.outvars)
        values = tuple(x for x in inputs if isinstance(x, Value))
        kind = OWN_DERIVATIVE + name_of(eqn)
        self.builder.append(Node(kind, values, outs, made.attrs, source))
        return list(outs)

    def _drafted(self, closed: Any, operands: Sequence[Operand]) -> Draft:
        """A body on ``operands``, everything in it inlined."""
        return draft_of(closed, operands, self.exact)

    def _branch(self, closed: Any, operands: Sequence[Operand]) -> Draft:
        """A body through which the gradient flows."""
        return draft_of(closed, operands, self.exact, self.rules)

    def _step(self, closed: Any, operands: Sequence[Operand]) -> Draft:
        """The body of a scan over time."""
        return draft_of(
            closed, operands, self.exact, self.rules, casts=self.casts, samples=self.samples
        )

    def _inner(self, builder: Builder, source: Source) -> _Walker:
        """Of what is called at ``source``."""
        inner = copy(self)
        inner.builder, inner.scope, inner.place = builder, source.module, source
        return inner

    def _call(self, called: Any, inputs: Sequence[Operand], source: Source) -> list[Operand]:
        inner = self._inner(self.builder, source)
        if isinstance(called, jex.ClosedJaxpr):
            consts = [inner.constant(c) for c in called.consts]
            return inner.run(called.jaxpr, [*consts, *inputs])
        return inner.run(called, inputs)

    def _scan(self, eqn: Any, inputs: list[Operand], source: Source) -> list[Operand]:
        params = eqn.params
        fixed, carried = params["num_consts"], params["num_carry"]
        body, length = params["jaxpr"], params["length"]
        stacked = inputs[fixed + carried :]
        gives_stacks = any(not isinstance(v, jex.DropVar) for v in eqn.outvars[carried:])
        if (
            carried
            and length > 1
            and stacked
            and not gives_stacks
            and any(_is_parameter(x) for x in stacked)
            and all(_is_parameter(x) or self._rows(x) for x in stacked)
        ):
            return self._block(eqn, inputs, source)
        if length > MOST_STEPS or not any(map(_is_parameter, stacked)):
            self.builder.source = source
            dtypes = self.casts.of_carries(eqn)
            whole = scanned(eqn, inputs, dtypes, self._step, self.builder, self.samples)
            if whole is not None:
                return whole
        consts, carry = inputs[:fixed], inputs[fixed : fixed + carried]
        stacks: list[dict[int, Operand]] = [{} for _ in eqn.outvars[carried:]]
        steps = range(length - 1, -1, -1) if params["reverse"] else range(length)
        for step in steps:
            pieces = [self._pick(x, step) for x in stacked]
            results = self._call(body, [*consts, *carry, *pieces], source)
            carry = results[:carried]
            for stack, value in zip(stacks, results[carried:], strict=True):
                stack[step] = value
        return [
            *carry,
            *(self._stack(s, v) for s, v in zip(stacks, eqn.outvars[carried:], strict=True)),
        ]

    def _block(self, eqn: Any, inputs: list[Operand], source: Source) -> list[Operand]:
        """The scan as one node; its body's operands are those of the jaxpr's, but numbers and masks
        that are made from constants: those are made in the body, where attention can see them.
        What each layer has of its own of the batch counts as constant."""
        params = eqn.params
        fixed, carried = params["num_consts"], params["num_carry"]
        walker = self._inner(Builder(), source)
        given: list[Operand] = []
        parts: list[list[tuple[Value, Operand]]] = [[], [], [], []]
        each: dict[Value, tuple[Value, ...]] = {}
        for place, (x, var) in enumerate(zip(inputs, params["jaxpr"].jaxpr.invars, strict=True)):
            own = made_again(x, self.builder, walker.builder) if place < fixed else None
            if own is not None:
                given.append(own)
                continue
            shape, dtype = tuple(map(int, var.aval.shape)), str(var.aval.dtype)
            value = Value(shape, dtype)
            if place < fixed + carried:
                parts[0 if place < fixed else 2].append((value, self.builder.tensor(x)))
            elif rows := self._rows(x):
                each[value] = rows
                parts[1].append((value, rows[0]))
            else:
                outer = self.builder.tensor(x)
                value = Value(shape, dtype, "parameter", outer.path, outer.frozen)
                parts[3].append((value, outer))
            given.append(value)
        consts = [walker.constant(c) for c in params["jaxpr"].consts]
        results = walker.run(params["jaxpr"].jaxpr, [*consts, *given])[:carried]
        made = tuple(walker.builder.tensor(x) for x in results)
        pairs = [pair for part in parts for pair in part]
        body = Draft(tuple(v for v, _ in pairs), tuple(walker.builder.nodes), made)
        outs = tuple(Value(tuple(map(int, v.aval.shape)), str(v.aval.dtype)) for v in eqn.outvars)
        attrs = {
            "body": body,
            "length": params["length"],
            "consts": len(parts[0]) + len(parts[1]),
            "each": each,
            "carries": carried,
            "reverse": params["reverse"],
        }
        self.builder.source = source
        operands = tuple(x for _, x in pairs)
        self.builder.append(Node("scan", operands, outs[:carried], attrs, source))
        return list(outs)

    def _rows(self, x: Operand) -> tuple[Value, ...]:
        """The batch entries of which ``x`` is the stack, along dim 0; else nothing."""
        node = self.builder.made_by(x, "stack")
        rows = () if node is None or node.attrs["dim"] else node.values
        return rows if all(row.role == "input" for row in rows) else ()

    def _pick(self, x: Operand, step: int) -> Operand:
        if isinstance(x, Uniform):
            return replace(x, shape=x.shape[1:])
        if rows := self._rows(x):
            return rows[step]
        return self.builder.op("select", (x,), x.shape[1:], x.dtype, dim=0, index=step)

    def _stack(self, pieces: Mapping[int, Operand], var: Any) -> Operand:
        dtype, shape = str(var.aval.dtype), tuple(map(int, var.aval.shape))
        values = [self.builder.tensor(pieces[i]) for i in sorted(pieces)]
        return self.builder.op("stack", values, shape, dtype, dim=0)

    def _source(self, eqn: Any) -> Source:
        scope = ".".join(s for s in (self.scope, scope_of(str(eqn.source_info.name_stack))) if s)
        for file, line in frames_of(eqn)[0]:
            return Source(scope, file, line)
        return Source(scope, self.place.file, self.place.line)


def _is_entry(x: Operand) -> bool:
    return isinstance(x, Value) and x.role == "input" and bool(x.shape)


def _is_parameter(x: Operand) -> bool:
    return isinstance(x, Value) and x.role == "parameter"
