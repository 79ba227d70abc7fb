"""Functions with a derivative of their own: `jax.custom_vjp`, `jax.custom_jvp` and what uses them.

Such a call becomes one op, whose two graphs are the function and its rule as JAX applies it: the
gradients of the operands from the operands and the gradients of the results. So nothing has to be
known of how the rule was written. A function of JAX itself is inlined where differentiating what it
computes gives what its rule gives, which is tried on numbers; a function of the user never is,
because trying proves nothing about the numbers that were not tried.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from autopar.frontends.jax.draft import Draft, Node, Operand, Uniform, Value
from autopar.frontends.jax.errors import RuleFailed
from autopar.frontends.jax.finish import graph_of
from autopar.frontends.jax.interpret import results_of
from autopar.frontends.jax.simplify import simplified
from autopar.nouns.graph import Graph, without_sources
from autopar.nouns.text.graph import to_text
from autopar.rules.composite import Indices, indices_of
from autopar.rules.kept_whole import keep_whole
from autopar.rules.localised import localised
from autopar.rules.own_functions import LINEAR
from autopar.rules.registry import UnruledOp, rule_for

CUSTOM = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
"""Primitive -> the parameter that holds what it computes."""
SOLVE = "custom_linear_solve"
"""A primitive that is differentiated by another solve, whatever it computes its own by."""
LIBRARY = os.path.dirname(jax.__file__) + "/"
SMALL = 5  # about the size of a dim when numbers are tried
CLOSE = 1e-9
CORNERS, WRITTEN = 8, 2  # trials

Drafted = Callable[[Any, Sequence[Operand]], Draft]
"""A closed jaxpr on operands, everything in it inlined."""


@dataclass(slots=True)
class Rules:
    """The backward jaxprs of one trace, made once for a call, and for equal calls of a function of
    JAX itself; those of a user may have closed over something else.

    Their literals are looked up by identity, as those of the trace are.

    plain: of calls of JAX's own functions, by function and operands, whether the rule gives what
           differentiating the function does: a loop over time asks it of each step.
    """

    made: dict[object, tuple[Any, Any]] = field(default_factory=dict)
    plain: dict[object, bool] = field(default_factory=dict)

    def backward(self, eqn: Any) -> Any:
        """operands, gradients of the results -> gradients of the operands that are floats."""
        key = self._key(eqn)
        if key not in self.made:  # the equation is kept, so that no other gets its id
            self.made[key] = eqn, backward_of(eqn)
        return self.made[key][1]

    def knows(self, eqn: Any) -> bool:
        return self._key(eqn) in self.made

    def is_plain(self, eqn: Any, operands: Sequence[Operand]) -> bool:
        """Whether that is known, and so."""
        return self.plain.get(self._asked(eqn, operands), False)

    def decide(
        self, eqn: Any, made: Function, drafted: Drafted, operands: Sequence[Operand]
    ) -> bool:
        """Whether the call is what `is_what_it_computes` says; asked once for equal calls."""
        if not is_library(eqn):
            return False
        asked = self._asked(eqn, operands)
        if asked not in self.plain:
            self.plain[asked] = is_what_it_computes(eqn, made, drafted, operands)
        return self.plain[asked]

    def _asked(self, eqn: Any, operands: Sequence[Operand]) -> object:
        given = ((x.shape, x.dtype) if isinstance(x, Value) else x for x in operands)
        return self._key(eqn), tuple(given)

    def _key(self, eqn: Any) -> object:
        if not is_library(eqn):
            return id(eqn)
        return _function(eqn), str(eqn.params[CUSTOM[eqn.primitive.name]])


def backward_of(eqn: Any) -> Any:
    """The closed jaxpr of an equation's vector-Jacobian product, by JAX's own rules."""

    def run(*operands: Any) -> Any:
        params = eqn.primitive.get_bind_params(eqn.params)
        return eqn.primitive.bind(*operands, **params)

    return _vjp(run, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars])


def _vjp(run: Callable[..., Any], operands: Sequence[Any], results: Sequence[Any]) -> Any:
    floats = [i for i, a in enumerate(operands) if is_float(a)]

    def backward(given: Sequence[Any], gradients: Sequence[Any]) -> Any:
        def of(*some: Any) -> Any:
            merged = list(given)
            for i, x in zip(floats, some, strict=True):
                merged[i] = x
            return run(*merged)

        _, pull = jax.vjp(of, *(given[i] for i in floats))
        return pull(
            [
                g if is_float(a) else np.zeros(a.shape, jax.dtypes.float0)
                for g, a in zip(gradients, results, strict=True)
            ]
        )

    shapes = [[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in s] for s in (operands, results)]
    closed = jax.make_jaxpr(backward)(*shapes)
    return jex.ClosedJaxpr(_without_unread(closed.jaxpr), closed.consts)


def is_float(aval: Any) -> bool:
    return "float" in str(aval.dtype)


def body_of(eqn: Any) -> Any:
    """The closed jaxpr of what an equation computes."""
    if eqn.primitive.name != SOLVE:
        body = eqn.params[CUSTOM[eqn.primitive.name]]
        return body if isinstance(body, jex.ClosedJaxpr) else jex.ClosedJaxpr(body, ())
    solve, lengths = eqn.params["jaxprs"].solve, eqn.params["const_lengths"]
    before = lengths.matvec + lengths.vecmat
    behind = before + lengths.solve + lengths.transpose_solve

    def run(*operands: Any) -> Any:
        consts = operands[before : before + lengths.solve]
        return jex.jaxpr_as_fun(solve)(*consts, *operands[behind:])

    return jax.make_jaxpr(run)(*(v.aval for v in eqn.invars))


def name_of(eqn: Any) -> str:
    """The function's name, as an identifier."""
    if eqn.primitive.name == SOLVE:
        return "linear_solve"
    name = _function(eqn).partition(" at ")[0]
    return re.sub(r"\W+", "_", name).strip("_") or "function"


def is_library(eqn: Any) -> bool:
    """Whether function and rule stand in JAX itself; a solve is not what its body is differentiated
    to, so it counts as the user's."""
    if eqn.primitive.name == SOLVE:
        return False
    rules = [eqn.params[k] for k in ("jvp_jaxpr_fun", "bwd", "fwd_jaxpr_thunk") if k in eqn.params]
    places = [_function(eqn), *(_place(getattr(r, "debug_info", None)) for r in rules)]
    return all(f" at {LIBRARY}" in place for place in places)


def _function(eqn: Any) -> str:
    body = eqn.params[CUSTOM[eqn.primitive.name]]
    return _place(getattr(body, "jaxpr", body).debug_info)


def _place(info: Any) -> str:
    """``"name at file:line"``."""
    return str(getattr(info, "func_src_info", "") or "")


def known_kind(eqn: Any, rules: Rules) -> str:
    """The kind of op that the call is, "" for none: it is what a function of JAX makes of a tensor
    of that shape, and so is its rule. At zero neither is what its body would give."""
    if len([v for v in eqn.invars if not isinstance(v, jex.Literal)]) != 1 or not is_library(eqn):
        return ""
    aval = eqn.invars[0].aval
    for kind, function in KNOWN.items():
        jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).jaxpr
        while jaxpr.eqns and jaxpr.eqns[0].primitive.name == "jit":
            jaxpr = jaxpr.eqns[0].params["jaxpr"].jaxpr
        other = jaxpr.eqns[0]
        if len(jaxpr.eqns) == 1 and _looks(eqn) == _looks(other):
            return kind if str(rules.backward(eqn)) == str(rules.backward(other)) else ""
    return ""


KNOWN = {"relu": jax.nn.relu, "softplus": jax.nn.softplus}


def _looks(eqn: Any) -> object:
    body = CUSTOM.get(eqn.primitive.name)
    numbers = [str(v) if isinstance(v, jex.Literal) else "" for v in eqn.invars]
    return body and (_function(eqn), str(eqn.params[body]), numbers)


def _without_unread(jaxpr: Any) -> Any:
    """A jaxpr without the equations whose results nobody reads."""
    needed, kept = set(map(id, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if any(id(v) in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(map(id, eqn.invars))
    return jaxpr.replace(eqns=kept[::-1])


@dataclass(frozen=True, slots=True)
class Function:
    """What becomes one op. ``gradients``: the operands that the results of ``backward`` are for, by
    their positions among those of the op."""

    forward: Graph
    backward: Graph
    gradients: tuple[int, ...]
    indices: Indices

    @property
    def attrs(self) -> dict[str, Any]:
        texts = {"forward": to_text(self.forward), "backward": to_text(self.backward)}
        rule = {"rule": self.indices.rule.text} if self.indices.splits else {}
        linear = {LINEAR: self.indices.rule.defers}
        return {**texts, "gradients": self.gradients, **linear, **rule}


def function_of(eqn: Any, operands: Sequence[Operand], backward: Any, drafted: Drafted) -> Function:
    """The function on ``operands``, numbers among them put into it; ``backward`` as from `Rules`.

    Raises `UnruledOp` where an op in it can neither be split nor be written, and what capturing
    its body raises.
    """
    closed = body_of(eqn)
    given = [
        Value(x.shape, x.dtype, "input", f"x{i}") if isinstance(x, Value) else x
        for i, x in enumerate(operands)
    ]
    values = [i for i, x in enumerate(given) if isinstance(x, Value)]
    results = [
        Value(tuple(map(int, v.aval.shape)), str(v.aval.dtype), "input", f"g{i}")
        for i, v in enumerate(eqn.outvars)
    ]
    floats = [i for i, x in enumerate(given) if "float" in x.dtype]
    back = drafted(backward, [*given, *results])
    wanted = [(i, out) for i, out in zip(floats, back.outputs, strict=True) if i in values]
    back = Draft(back.inputs, back.nodes, tuple(out for _, out in wanted))
    forward, pulled = drafted_graph(drafted(closed, given)), drafted_graph(back)
    gradients = tuple(values.index(i) for i, _ in wanted)
    return Function(forward, pulled, gradients, indices_of(forward, pulled, gradients))


def drafted_graph(draft: Draft) -> Graph:
    """The graph of a body; ops in it that have no rule are whole."""
    graph = without_sources(graph_of(_apart(simplified(draft)))[0])
    without = set()
    for op in graph.ops:
        try:
            rule_for(op, graph.tensors)
        except UnruledOp:
            without.add(op.kind)
    return keep_whole(graph, without)


def _apart(draft: Draft) -> Draft:
    """Results that are operands as they came in, as those of a function that changes the gradient
    alone, are made by an op, and so are numbers."""
    made: dict[Operand, Node] = {}
    for x in draft.outputs:
        out = (Value(x.shape, x.dtype),)
        if isinstance(x, Uniform):
            attrs = {"shape": x.shape, "value": x.value, "dtype": x.dtype}
            made[x] = Node("full", (), out, attrs)
        elif x in draft.inputs:
            made[x] = Node("identity", (x,), out)
    outputs = tuple(made[x].out if x in made else x for x in draft.outputs)
    return Draft(draft.inputs, (*draft.nodes, *made.values()), outputs)


def is_what_it_computes(eqn: Any, made: Function, drafted: Drafted, operands: Any) -> bool:
    """Whether differentiating what the function computes gives what its rule gives, on numbers."""
    body = eqn.params[CUSTOM[eqn.primitive.name]]
    run = jex.jaxpr_as_fun(body)
    avals = [[v.aval for v in side] for side in (eqn.invars, eqn.outvars)]
    try:
        backward = _vjp(run, *avals)
    except (ValueError, NotImplementedError):  # a loop, as of `jax.lax.custom_root`, or `zeta`
        return False
    plain = function_of(eqn, operands, backward, drafted)
    if plain.indices.rule.text != made.indices.rule.text:
        return False
    functions = [jax.jit(_small(f)) for f in (made, plain)]
    shapes = _operands(made)
    with jax.enable_x64(True):
        for numbers in _numbers(shapes, [*_written(made.forward), *_written(made.backward)]):
            ours, theirs = (f(*numbers) for f in functions)
            for a, b in zip(ours, theirs, strict=True):
                if not np.allclose(a, b, rtol=CLOSE, atol=1e-300, equal_nan=True):
                    return False
    return True


def _ways(made: Function) -> dict[str, int]:
    """Into how many pieces the indices are cut so that dims are small."""
    ways: dict[str, int] = {}
    for side, graph in (("forward", made.forward), ("backward", made.backward)):
        for tensor in graph.tensors.values():
            for d, size in enumerate(tensor.shape):
                index = made.indices.of[side, tensor.name, d]
                if index not in made.indices.whole and size > SMALL:
                    ways[index] = size // SMALL
    return ways


def _small(made: Function) -> Callable[..., Any]:
    return results_of(localised(made.backward, "backward", made.indices, _ways(made)), wide=True)


def _operands(made: Function) -> list[tuple[tuple[int, ...], str]]:
    small = localised(made.backward, "backward", made.indices, _ways(made))
    return [(small.tensors[n].shape, small.tensors[n].dtype) for n in small.inputs]


def _written(graph: Graph) -> Iterator[float]:
    """The numbers that stand in a graph: a maximum with one has a corner there."""
    for op in graph.ops:
        for name in ("other", "min", "max", "a", "b", "value"):
            number = op.attrs.get(name)
            if isinstance(number, int | float) and np.isfinite(number):
                yield float(number)


def _numbers(shapes: Sequence[tuple[tuple[int, ...], str]], written: Sequence[float]) -> Any:
    """Operands to try: ordinary numbers and those at which functions have corners, by turns; then
    ordinary ones with ``written`` ones among them, few enough that a matrix stays a regular one."""
    rng = np.random.default_rng(0)
    corners = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1e-8, -1e-8, 3.0, 6.0, -20.0, 20.0, 300.0])
    others = sorted({*written} - {*corners.tolist()})

    def make(shape: tuple[int, ...], dtype: str, trial: int) -> Any:
        if dtype == "bool":
            return rng.random(shape) < 0.5
        if "int" in dtype:
            return rng.integers(0, 2, shape).astype(dtype)
        if trial < CORNERS and trial % 2 == 1:
            return rng.choice(corners, shape)
        ordinary = rng.normal(size=shape)
        if trial < CORNERS:
            return ordinary
        return np.where(rng.random(shape) < 0.5, rng.choice(others, shape), ordinary)

    for trial in range(CORNERS + (WRITTEN if others else 0)):
        yield [make(s, d, trial) for s, d in shapes]


def rule_failed(eqn: Any, source: Any, error: Exception) -> RuleFailed:
    """What to say where a rule cannot be applied."""
    return RuleFailed(
        f"{source}: the derivative of {_function(eqn) or 'a function'} failed: "
        f"{type(error).__name__}: {str(error).partition(chr(10))[0]}\nIt is a custom_vjp or "
        "custom_jvp whose rule JAX applies to all operands that are floats; "
        "jax.grad of the loss shows the same error"
    )
