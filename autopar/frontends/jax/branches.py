"""Branches and loops whose bodies run as they are: ``cond``, ``switch`` and ``while_loop``.

Each is one op with the graphs of its bodies. A body runs on a rank's own pieces, without
collectives, so what says which one runs is the same on all ranks of a piece; where a body pairs
entries of a dim, that is whole (`autopar.rules.composite`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from autopar.frontends.jax.derivatives import drafted_graph
from autopar.frontends.jax.draft import Builder, Draft, Node, Operand, Uniform, Value
from autopar.frontends.jax.errors import ControlFlow
from autopar.frontends.jax.predicates import one_predicate
from autopar.nouns.graph import Graph, Op, Tensor
from autopar.nouns.kinds import BODIES, CARRIED, EACH, LOOP, SWITCH, TAKES, UNGRADED
from autopar.nouns.text.graph import to_text
from autopar.rules.bodies import body_indices
from autopar.rules.called import RULE

Drafted = Callable[[Any, Sequence[Operand]], Draft]


def switched(
    eqn: Any, inputs: Sequence[Operand], drafted: Drafted, builder: Builder
) -> list[Value]:
    """A ``cond`` or ``switch``: its operands are the number of the branch and those of all."""
    chosen, *rest = inputs
    given = [x for x in rest if isinstance(x, Value)]
    bodies = []
    for branch in eqn.params["branches"]:
        named = iter(range(len(given)))
        own = [_input(x, f"x{next(named)}") if isinstance(x, Value) else x for x in rest]
        bodies.append(drafted_graph(drafted(branch, own)))
    takes = (tuple(range(1, 1 + len(given))),) * len(bodies)
    return _made(SWITCH, eqn, [builder.tensor(chosen), *given], bodies, takes, (), builder)


def looped(eqn: Any, inputs: Sequence[Operand], drafted: Drafted, builder: Builder) -> list[Value]:
    """A ``while``: its operands are the constants of both bodies and what it begins with."""
    params, inputs, each = one_predicate(eqn, inputs)
    first = params["cond_nconsts"]
    behind = first + params["body_nconsts"]
    carried = [builder.tensor(x) for x in inputs[behind:]]
    fixed = dict.fromkeys(x for x in inputs[:behind] if isinstance(x, Value))
    operands = [*fixed, *carried]
    begin = len(operands) - len(carried)
    bodies, takes = [], []
    for name, consts in (("cond_jaxpr", inputs[:first]), ("body_jaxpr", inputs[first:behind])):
        own: list[Operand] = []
        places: list[int] = []
        for x in (*consts, *carried):
            if isinstance(x, Uniform):
                own.append(x)
                continue
            own.append(_input(x, f"x{len(places)}"))
            places.append(operands.index(x))
        count = len(places) - len(carried)
        places[count:] = range(begin, len(operands))
        bodies.append(drafted_graph(drafted(params[name], own)))
        takes.append(tuple(places))
    carries = tuple(range(begin, len(operands)))
    more = {EACH: True} if each else {}
    return _made(LOOP, eqn, operands, bodies, tuple(takes), carries, builder, more)


def _input(x: Value, name: str) -> Value:
    return Value(x.shape, x.dtype, "input", name)


def _made(
    kind: str,
    eqn: Any,
    operands: Sequence[Value],
    bodies: Sequence[Graph],
    takes: tuple[tuple[int, ...], ...],
    carried: tuple[int, ...],
    builder: Builder,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> list[Value]:
    outs = tuple(Value(tuple(map(int, v.aval.shape)), str(v.aval.dtype)) for v in eqn.outvars)
    attrs: dict[str, Any] = {BODIES: tuple(map(to_text, bodies)), TAKES: takes}
    attrs |= {**more, **({CARRIED: carried} if carried else {})}
    none = (i for i, x in enumerate(outs) if kind == LOOP or "float" not in x.dtype)
    attrs[UNGRADED] = tuple(none)
    named = [Tensor(f"x{i}", x.shape, x.dtype) for i, x in enumerate(operands)]
    named += [Tensor(f"y{i}", x.shape, x.dtype) for i, x in enumerate(outs)]
    count = len(operands)
    names = tuple(t.name for t in named)
    op = Op(kind, names[:count], names[count:], attrs)
    indices = body_indices(op, {t.name: t for t in named})
    if indices.splits:
        attrs[RULE] = indices.rule.text
    builder.append(Node(kind, tuple(operands), outs, attrs, builder.source))
    return list(outs)


def check_loops(graph: Graph) -> None:
    """Refuses loops through which the gradient flows. Raises `ControlFlow`."""
    for part in (graph, *(block.body for block in graph.blocks.values())):
        for op in part.ops:
            if op.kind == LOOP and any(part.tensors[n].differentiable for n in op.outputs):
                raise ControlFlow(
                    f"{op.source}: the gradient flows through a while_loop, or a fori_loop with a "
                    "traced bound, which JAX cannot differentiate: give a static length, which "
                    "makes it a scan, or take what it gives by jax.lax.stop_gradient"
                )


def only_branch(params: Any, chosen: Operand) -> Any | None:
    """The branch of a cond or switch that is known to be taken: by a number that is known, or where
    platforms decide, that of every platform without one of its own."""
    branches, platforms = params["branches"], params.get("branches_platforms")
    if platforms is not None:
        return branches[platforms.index(None)] if None in platforms else None
    if isinstance(chosen, Uniform):
        return branches[max(0, min(int(chosen.value), len(branches) - 1))]
    return None
