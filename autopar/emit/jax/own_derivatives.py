"""Functions with a derivative of their own, written before the blocks that call them.

Function and rule are graphs among an op's attrs. Each is written on one rank's pieces, like a
program of one device: no index that pairs entries is ever split (`autopar.rules.composite`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.emit.jax.errors import JaxEmitError
from autopar.emit.jax.functions import Printing, body
from autopar.emit.jax.shapes import shown, signature
from autopar.emit.names import identifier
from autopar.emit.text import tuple_text
from autopar.lowering.lowered import BATCH_AXES, Lowered, LoweredOp
from autopar.lowering.spread import lower
from autopar.nouns.axes import MICROBATCH
from autopar.nouns.graph import Graph
from autopar.nouns.kinds import OWN_DERIVATIVE
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread, key
from autopar.nouns.text.graph import from_text
from autopar.rules.composite import Indices, indices_of, localised
from autopar.rules.cut import BatchCut, Cut

SUFFIX = "_backward"


def own_derivatives(lowered: Lowered, reserved: frozenset[str]) -> tuple[dict[str, str], list[str]]:
    """(name of the function of every such op by `key`, the definitions in order)."""
    names: dict[str, str] = {}
    written: dict[str, str] = {}  # definition without its name -> name
    texts: list[str] = []
    for part in (*lowered.blocks.values(), lowered):
        for op in part.ops:
            if not op.op.kind.startswith(OWN_DERIVATIVE):
                continue
            definition = _definition(op, part)
            if definition not in written:
                hint = identifier(op.op.kind.removeprefix(OWN_DERIVATIVE))
                while {hint, hint + SUFFIX} & {*reserved, *written.values()}:
                    hint += "_"
                written[definition] = hint
                texts += definition.replace(NAME, hint).split(BETWEEN)
            names[key(part.block, op.op.name)] = written[definition]
    return names, texts


NAME, BETWEEN = "\0name\0", "\0between\0"
"""Stand for a name that is not chosen yet, and for the end of a function."""


def _definition(op: LoweredOp, lowered: Lowered) -> str:
    attrs = op.op.attrs
    forward, backward = (from_text(attrs[side]) for side in ("forward", "backward"))
    indices = indices_of(forward, backward, attrs["gradients"])
    ways = dict(_ways(op, lowered, forward, indices))
    parts = []
    for side, graph in (("backward", backward), ("forward", forward)):
        parts.append(_function(side, localised(graph, side, indices, ways), op))
    return BETWEEN.join(parts)


def _function(side: str, graph: Graph, op: LoweredOp) -> str:
    """The lines of one function. A collective cannot be in it: it is on a mesh of one device."""
    uncut = BatchCut(Cut({}, {o.name: "" for o in graph.ops}))
    alone = lower(graph, Spread(Mesh((), ())), 1, uncut)
    arguments, lines = body(alone, "params", Printing({}, frozenset()))
    typed = [f"{variable}: Array" for variable in arguments]
    given = ", ".join(
        f"{variable} {shown(graph.tensors[n], alone.tensors[n].produced, alone)}"
        for variable, n in zip(arguments, graph.inputs, strict=True)
    )
    made = ", ".join(
        shown(graph.tensors[n], alone.tensors[n].produced, alone) for n in graph.outputs
    )
    doc = f'    """{given} -> {made}"""'
    if side == "backward":
        return "\n".join([*signature(NAME + SUFFIX, typed, len(graph.outputs)), doc, *lines])
    gradients = op.op.attrs["gradients"]
    of = "" if len(gradients) == len(op.op.inputs) else f", of={tuple_text(gradients)}"
    head = [f"@derivative({NAME}{SUFFIX}{of})", *signature(NAME, typed, len(graph.outputs))]
    return "\n".join([*head, doc, *lines])


def _ways(
    op: LoweredOp, lowered: Lowered, forward: Graph, indices: Indices
) -> Iterator[tuple[str, int]]:
    """Into how many pieces the op's strategy splits which index. Raises `JaxEmitError` where it
    splits one that pairs entries, as a rule that a user registered may say."""
    for operand, name in zip(op.operands, forward.inputs, strict=True):
        for d in range(len(forward.tensors[name].shape)):
            axes = [a for a in operand.wanted.split_axes(d)]
            ways = math.prod(lowered.mesh.size(a) for a in axes)
            index = indices.of["forward", name, d]
            if ways > 1 and index in indices.whole and set(axes) - {MICROBATCH}:
                shown_axes = ", ".join(a for a in axes if a not in BATCH_AXES) or "the data axes"
                raise JaxEmitError(
                    f"the plan splits dim {d} of {op.op.inputs[0]} at {op.op.source} over "
                    f"{shown_axes}, which {op.op.kind} pairs with itself: take back the rule "
                    "registered for it"
                )
            yield index, ways
