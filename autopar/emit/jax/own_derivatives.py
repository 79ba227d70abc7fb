"""Functions with a derivative of their own, and bodies of branches, loops and scans, written before
the blocks that call them.

Function and rule, or bodies, are graphs among an op's attrs. Each is written on one rank's pieces,
like a program of one device: no index that pairs entries is ever split (`autopar.rules.composite`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.emit.jax.errors import JaxEmitError
from autopar.emit.jax.functions import body
from autopar.emit.jax.places import body_key
from autopar.emit.jax.printing import Printing
from autopar.emit.jax.shapes import STEP, shown, signature, step_arguments
from autopar.emit.names import identifier
from autopar.emit.text import tuple_text
from autopar.lowering.lowered import BATCH_AXES, Lowered, LoweredOp
from autopar.lowering.spread import lower
from autopar.nouns.axes import MICROBATCH
from autopar.nouns.graph import Graph, Op
from autopar.nouns.kinds import CARRIED, LOOP, OWN_DERIVATIVE, SCAN, STACKED
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread, key
from autopar.nouns.text.graph import from_text
from autopar.rules.bodies import bodies_of, body_indices
from autopar.rules.composite import Indices, indices_of, own_names
from autopar.rules.cut import BatchCut, Cut
from autopar.rules.localised import localised

SUFFIX = "_backward"


def own_derivatives(lowered: Lowered, reserved: frozenset[str]) -> tuple[dict[str, str], list[str]]:
    """(name of the function of every such op by `key`, the definitions in order)."""
    functions = _Functions(reserved)
    return functions.of(lowered), functions.texts


NAME, BETWEEN = "\0name\0", "\0between\0"
"""Stand for a name that is not chosen yet, and for the end of a function."""


@dataclass(slots=True)
class _Functions:
    """``written``: of each definition without its name the name; ``texts``: all that is defined,
    what stands inside of others first."""

    reserved: frozenset[str]
    written: dict[str, str] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def of(self, lowered: Lowered) -> dict[str, str]:
        """The names of the functions of a graph's ops."""
        names: dict[str, str] = {}
        for part in (*lowered.blocks.values(), lowered):
            for op in part.ops:
                place = key(part.block, op.op.name)
                if op.op.kind.startswith(OWN_DERIVATIVE):
                    hint = identifier(op.op.kind.removeprefix(OWN_DERIVATIVE))
                    names[place] = self._named(self._derivative(op, part), hint)
                for i, text in enumerate(self._bodies(op, part)):
                    names[body_key(place, i)] = self._named(text, body_name(op.op, i))
        return names

    def _named(self, definition: str, hint: str) -> str:
        if definition not in self.written:
            while {hint, hint + SUFFIX} & {*self.reserved, *self.written.values()}:
                hint += "_"
            self.written[definition] = hint
            self.texts.extend(definition.replace(NAME, hint).split(BETWEEN))
        return self.written[definition]

    def _bodies(self, op: LoweredOp, lowered: Lowered) -> Iterator[str]:
        """The definitions of the bodies of a branch, a loop or a scan."""
        bodies = bodies_of(op.op)
        if not bodies:
            return
        indices = body_indices(op.op, lowered.graph.tensors)
        ways = dict(_ways(op, lowered, own_names(op.op), indices))
        for i, each in enumerate(bodies):
            yield self._function(str(i), localised(each.graph, str(i), indices, ways), op)

    def _derivative(self, op: LoweredOp, lowered: Lowered) -> str:
        attrs = op.op.attrs
        forward, backward = (from_text(attrs[side]) for side in ("forward", "backward"))
        indices = indices_of(forward, backward, attrs["gradients"])
        ways = dict(_ways(op, lowered, [*forward.inputs, *forward.outputs], indices))
        parts = []
        for side, graph in (("backward", backward), ("forward", forward)):
            parts.append(self._function(side, localised(graph, side, indices, ways), op))
        return BETWEEN.join(parts)

    def _function(self, side: str, graph: Graph, op: LoweredOp) -> str:
        """The lines of one function. A collective cannot be in it: it is on a mesh of one
        device."""
        uncut = BatchCut(Cut({}, {o.name: "" for o in graph.ops}))
        alone = lower(graph, Spread(Mesh((), ())), 1, uncut)
        inside = self.of(alone)
        scans = op.op.kind == SCAN
        carries = len(op.op.attrs[CARRIED]) if scans else None
        reserved = frozenset(inside.values()) | (STEP if scans else frozenset())
        arguments, lines = body(alone, "params", Printing(inside, reserved, carries=carries))
        typed = [f"{variable}: Array" for variable in arguments]
        if carries is not None:
            typed, first = step_arguments(arguments, carries, len(op.op.attrs[STACKED]))
            lines = [*first, *lines]
        given = ", ".join(
            f"{variable} {shown(graph.tensors[n], alone.tensors[n].produced, alone)}"
            for variable, n in zip(arguments, graph.inputs, strict=True)
        )
        made = ", ".join(
            shown(graph.tensors[n], alone.tensors[n].produced, alone) for n in graph.outputs
        )
        doc = f'    """{given} -> {made}"""'
        name = NAME + SUFFIX * (side == "backward")
        head = signature(name, typed, len(graph.outputs), carries)
        if side == "forward":
            gradients = op.op.attrs["gradients"]
            of = "" if len(gradients) == len(op.op.inputs) else f", of={tuple_text(gradients)}"
            head = [f"@derivative({NAME}{SUFFIX}{of})", *head]
        return "\n".join([*head, doc, *lines])


def body_name(op: Op, number: int) -> str:
    """What a body is called: ``goes_on`` and ``step`` of a loop, ``step`` of a scan, ``branch_0``
    and so on."""
    if op.kind == SCAN:
        return "step"
    return ("goes_on", "step")[number] if op.kind == LOOP else f"branch_{number}"


def _ways(
    op: LoweredOp, lowered: Lowered, names: Sequence[str], indices: Indices
) -> Iterator[tuple[str, int]]:
    """Into how many pieces the op's strategy splits which index. Raises `JaxEmitError` where it
    splits one that pairs entries, as a rule that a user registered may say."""
    held = [(operand.name, operand.wanted) for operand in op.operands]
    held += zip(op.op.outputs, op.results, strict=True)
    for (tensor, sharding), name in zip(held, names, strict=True):
        for d in range(len(lowered.graph.tensors[tensor].shape)):
            axes = list(sharding.split_axes(d))
            ways = math.prod(lowered.mesh.size(a) for a in axes)
            index = indices.of["forward", name, d]
            if ways > 1 and index in indices.whole and set(axes) - {MICROBATCH}:
                shown_axes = ", ".join(a for a in axes if a not in BATCH_AXES) or "the data axes"
                raise JaxEmitError(
                    f"the plan splits dim {d} of {tensor} at {op.op.source} over "
                    f"{shown_axes}, which {op.op.kind} pairs with itself: take back the rule "
                    "registered for it"
                )
            yield index, ways
