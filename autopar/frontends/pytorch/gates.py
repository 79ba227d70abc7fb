"""What lies between the two products of an expert, as the steps of `autopar.rules.gates`.

Operand 0 is what the first product gives, or the gate of it where the product gives a gate and what
is gated (operand 1).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.ir import Node, Value, final
from autopar.frontends.pytorch.lifter import Lifter
from autopar.nouns.kinds import DRAWS
from autopar.rules.elementwise import ELEMENTWISE
from autopar.rules.gates import Step

ALL, HALVES, PAIRS = "all", "halves", "pairs"
"""How the first product's results are read: each alone; ``[gate..., up...]``; ``[gate, up, ...]``
one after the other."""

_ALIASES = frozenset({"identity", "reshape"})


def gate_steps(lifter: Lifter, name: str) -> tuple[str, tuple[Step, ...]]:
    """(how results are read, the steps) of a function of one tensor [rows, width].

    Raises `UnsupportedOpError`, which calls the experts by ``name``, where an op is not element by
    element.
    """
    (whole,) = lifter.inputs
    nodes = [
        n for n in lifter.nodes if n.kind not in _ALIASES or n.inputs[0].shape != n.output.shape
    ]
    same = {n.output: n.inputs[0] for n in lifter.nodes if n not in nodes}
    places, reads = _parts(nodes, whole)
    steps: list[Step] = []
    for node in nodes:
        if all(v in places for v in node.outputs):
            continue
        operands = [places.get(final(same, v)) for v in node.inputs]
        plain = node.kind in ELEMENTWISE and node.kind not in DRAWS and len(node.outputs) == 1
        if not plain or None in operands:
            raise UnsupportedOpError(
                f"{node.source}: between the products of {name} stands {node.kind!r}, which is not "
                "element by element on what the first product gives: experts are planned as two "
                "products with such ops between them"
            )
        attrs = {k: v for k, v in node.attrs.items() if k != "torch"}
        steps.append((node.kind, tuple(p for p in operands if p is not None), attrs))
        places[node.output] = len(steps) + (reads != ALL)
    result = places.get(final(same, lifter.result)) if lifter.result is not None else None
    if not steps or result != len(steps) + (reads != ALL):
        raise UnsupportedOpError(
            f"{lifter.source}: what {name} hands to its second product is no step of its gate"
        )
    return reads, tuple(steps)


def _parts(nodes: Sequence[Node], whole: Value) -> tuple[dict[Value, int], str]:
    """The operands that are parts of the first product's result, and how they lie in it."""
    width = whole.shape[1]
    half = width // 2
    for node in nodes:
        if node.kind == "split" and node.inputs == [whole]:
            if node.attrs["dim"] in (1, -1) and tuple(node.attrs["sizes"]) == (half, half):
                return {value: i for i, value in enumerate(node.outputs)}, HALVES
    cuts = {
        (n.attrs["start"], n.attrs["stop"], n.attrs["step"]): n.output
        for n in nodes
        if n.kind == "slice" and n.inputs == [whole] and n.attrs["dim"] in (1, -1)
    }
    for reads, gate, up in (
        (HALVES, (0, half, 1), (half, width, 1)),
        (PAIRS, (0, width, 2), (1, width, 2)),
    ):
        if cuts.keys() == {gate, up}:
            return {cuts[gate]: 0, cuts[up]: 1}, reads
    return {whole: 0}, ALL
