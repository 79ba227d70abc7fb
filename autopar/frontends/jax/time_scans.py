"""Scans over time as one op: an RNN's steps, a state space's, a sum that goes along a sequence.

The body is the graph of one step, which runs on a rank's own pieces, as those of branches and loops
do (`autopar.frontends.jax.branches`). Unlike a loop's it is differentiated: `jax.lax.scan` is in
the program, whose backward goes back through the steps.

Few steps are written out instead (`MOST_WRITTEN`): ops outside of a body may be split over model
axes in more ways, and attention and layers are seen in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.extend.core as jex

from autopar.frontends.jax.derivatives import drafted_graph
from autopar.frontends.jax.draft import Builder, Draft, Node, Operand, Uniform, Value
from autopar.frontends.jax.errors import CaptureError
from autopar.frontends.jax.finish import graph_of
from autopar.frontends.jax.products import products_named
from autopar.nouns.errors import first_of
from autopar.nouns.graph import Graph, Op, Tensor, unique
from autopar.nouns.kinds import (
    AGAIN,
    BODIES,
    CARRIED,
    LENGTH,
    PAIRS,
    REVERSE,
    SCAN,
    STACKED,
    TAKES,
    UNGRADED,
)
from autopar.nouns.text.graph import to_text
from autopar.rules.bodies import body_indices
from autopar.rules.body_work import facts_of_scan
from autopar.rules.called import RULE
from autopar.rules.composite import Indices
from autopar.rules.own_functions import LINEAR
from autopar.rules.registry import UnruledOp, bind

MOST_WRITTEN = 32
"""Steps of a scan over time that are written out: planning those takes longer with every step, as
one op as long whatever their number."""
MOST_STEPS = 1024
"""Of a scan whose body can be none of an op."""
NAMED = 4
"""Ops that are named where none of its dims can be split."""
REMATERIALISED = frozenset(("remat", "remat2", "checkpoint"))

Drafted = Callable[[Any, Sequence[Operand]], Draft]


def scanned(
    eqn: Any,
    inputs: Sequence[Operand],
    carried_as: Sequence[str],
    drafted: Drafted,
    builder: Builder,
    samples: frozenset[int],
) -> list[Operand] | None:
    """The results of a scan as one op; None where it is better written out, as one over layers is.

    carried_as: the dtypes of its carries in half precision, as `OwnCasts.of_carries`.
    samples: the sizes that the batch's first dims have, one of which must be left to split where
             the scan is short enough to be written out.
    """
    length = eqn.params["length"]
    stacked = inputs[eqn.params["num_consts"] + eqn.params["num_carry"] :]
    layers = length <= MOST_STEPS and any(_of_parameters(x, builder) for x in stacked)
    if length <= MOST_WRITTEN or layers:
        return None
    try:
        node, results, indices = _node(eqn, inputs, carried_as, drafted, builder)
    except (CaptureError, UnruledOp):
        if length > MOST_STEPS:
            raise
        return None
    if length <= MOST_STEPS and not _takes_samples(node, indices, samples):
        return None
    builder.append(node)
    return results


def _of_parameters(x: Operand, builder: Builder) -> bool:
    """Whether ``x`` is a parameter, or a view or cast of one."""
    if not isinstance(x, Value):
        return False
    node = builder.made_by(x, "cast", "reshape", "transpose", "slice")
    return x.role == "parameter" if node is None else _of_parameters(node.inputs[0], builder)


def is_again(eqn: Any) -> bool:
    """Whether the body of a scan is one `jax.checkpoint` without a policy."""
    body = eqn.params["jaxpr"].jaxpr
    if len(body.eqns) != 1 or body.eqns[0].primitive.name not in REMATERIALISED:
        return False
    return body.eqns[0].params.get("policy") is None and set(body.outvars) <= {
        *body.eqns[0].outvars,
        *body.invars,
    }


def _node(
    eqn: Any,
    inputs: Sequence[Operand],
    carried_as: Sequence[str],
    drafted: Drafted,
    builder: Builder,
) -> tuple[Node, list[Operand], Indices]:
    """The op, what each result of the equation is, and which dims its body pairs."""
    fixed, carries = eqn.params["num_consts"], eqn.params["num_carry"]
    behind = fixed + carries
    own: list[Operand] = []
    operands: list[Value] = []
    taken: set[str] = set()
    for place, x in enumerate(inputs):
        carry, row = fixed <= place < behind, place >= behind
        if isinstance(x, Uniform) and not carry:
            own.append(replace(x, shape=x.shape[row:]))
            continue
        value = builder.tensor(x)
        if carry and carried_as and value.dtype == "float32":
            value = _cast(value, carried_as[place - fixed], builder)
        name = unique("x" if row else "h" if carry else _name(value), taken)
        taken.add(name)
        own.append(Value(value.shape[row:], value.dtype, "input", name))
        operands.append(value)
    consts = sum(isinstance(x, Value) for x in own[:fixed])
    kept = [i for i, v in enumerate(eqn.outvars) if i < carries or not isinstance(v, jex.DropVar)]
    draft = _given_on(drafted(eqn.params["jaxpr"], own), kept, carried_as)
    graph = drafted_graph(products_named(draft))
    variables = [eqn.outvars[i] for i in kept]
    outs = [Value(tuple(map(int, v.aval.shape)), str(v.aval.dtype)) for v in variables]
    attrs: dict[str, Any] = {
        BODIES: (to_text(graph),),
        TAKES: (tuple(range(len(operands))),),
        CARRIED: tuple(range(consts, consts + carries)),
        STACKED: tuple(range(consts + carries, len(operands))),
        LENGTH: int(eqn.params["length"]),
        REVERSE: bool(eqn.params["reverse"]),
        UNGRADED: _ungraded(graph, inputs[fixed:behind], consts),
        **({AGAIN: True} if is_again(eqn) else {}),
    }
    op, tensors = _alone(operands, outs, attrs)
    indices = body_indices(op, tensors)
    attrs |= facts_of_scan(op, tensors, indices)
    if indices.splits:
        attrs[RULE] = indices.rule.text
    else:
        attrs[PAIRS] = _pairing(draft)
    if not indices.rule.defers:
        attrs[LINEAR] = False
    node = Node(SCAN, tuple(operands), tuple(outs), attrs, builder.source)
    made = dict(zip(kept, outs, strict=True))
    nobody = Uniform(0, "int32")  # for what nobody reads
    return node, [made.get(i, nobody) for i in range(len(eqn.outvars))], indices


def _pairing(draft: Draft) -> str:
    """The ops of a step that pair entries of some dim, with their lines."""
    graph, _ = graph_of(products_named(draft))
    pairing = []
    for op in graph.ops:
        try:
            factors = bind(op, graph.tensors).factors.values()
        except UnruledOp:
            pairing.append(f"{op.kind} at {op.source}, which has no rule")
            continue
        if any(f.kind != "parallel" and f.size > 1 for f in factors):
            pairing.append(f"{op.kind} at {op.source}")
    return first_of(list(dict.fromkeys(pairing)), NAMED) if pairing else "none does"


def _name(value: Value) -> str:
    """What a constant is called inside: a parameter's own name."""
    return value.path.rpartition(".")[2] or "w"


def _cast(x: Value, dtype: str, builder: Builder) -> Value:
    """To a dtype of half precision, or from there, in the graph of float32."""
    return builder.op("cast", (x,), x.shape, "float32", dtype=dtype, own=True)


def _given_on(draft: Draft, kept: Sequence[int], carried_as: Sequence[str]) -> Draft:
    """A step that makes what is ``kept``, and of float32 carries the dtypes that come in."""
    builder = Builder()
    for node in draft.nodes:
        builder.append(node)
    outputs = [draft.outputs[i] for i in kept]
    for i, dtype in enumerate(carried_as):
        if outputs[i].dtype == "float32":
            outputs[i] = _cast(builder.tensor(outputs[i]), dtype, builder)
    return Draft(draft.inputs, tuple(builder.nodes), tuple(outputs))


def _ungraded(graph: Graph, begins: Sequence[Operand], consts: int) -> tuple[int, ...]:
    """Results that are no floats, or follow from such and from numbers alone, as a clock does."""
    carries = len(begins)
    graded = {
        name
        for i, name in enumerate(graph.inputs)
        if "float" in graph.tensors[name].dtype
        and not (consts <= i < consts + carries and isinstance(begins[i - consts], Uniform))
    }
    while True:
        for op in graph.ops:
            if graded.intersection(op.inputs):
                graded.update(n for n in op.outputs if "float" in graph.tensors[n].dtype)
        begun = zip(graph.inputs[consts : consts + carries], graph.outputs, strict=False)
        new = {begin for begin, end in begun if end in graded} - graded
        if not new:
            return tuple(i for i, name in enumerate(graph.outputs) if name not in graded)
        graded |= new


def _alone(
    operands: Sequence[Value], outs: Sequence[Value], attrs: dict[str, Any]
) -> tuple[Op, dict[str, Tensor]]:
    """The op between tensors of its own; whatever is a float may have a gradient."""
    values = [*_named("x", operands), *_named("y", outs)]
    named = [Tensor(n, x.shape, x.dtype, differentiable="float" in x.dtype) for n, x in values]
    names, count = tuple(n for n, _ in values), len(operands)
    return Op(SCAN, names[:count], names[count:], attrs), {t.name: t for t in named}


def _takes_samples(node: Node, indices: Indices, samples: frozenset[int]) -> bool:
    """Whether some dim that the batch's samples may lie along can be split: one of their number
    if there is any beside that of time, else one of a multiple."""
    if RULE not in node.attrs:
        return False
    rows = {f"x{i}" for i in node.attrs[STACKED]}
    rows |= {f"y{i}" for i in range(len(node.attrs[CARRIED]), len(node.outputs))}
    free, whole = set[int](), set[int]()
    for name, x in (*_named("x", node.inputs), *_named("y", node.outputs)):
        for d, size in enumerate(x.shape):
            if indices.of["forward", name, d] not in indices.whole:
                free.add(size)
            elif not (name in rows and d == 0):
                whole.add(size)
    if free & samples or not samples:
        return True
    return not whole & samples and any(size % n == 0 for size in free for n in samples)


def _named(letter: str, values: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"{letter}{i}", x) for i, x in enumerate(values)]
