"""What values are to those who read them: queries, keys and values, logits, labels, angles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.emit.source_names import source_names, statement_names
from autopar.lowering.lowered import Lowered
from autopar.nouns.graph import Op

_OPERANDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("q", "k", "v", "mask"),
    "rotary": ("", "cos", "sin"),
    "gated_activation": ("gate", ""),
    "cross_entropy": ("logits", "labels"),
    "linear_cross_entropy": ("hidden", "labels"),
    "ctc_loss": ("log_probs", "targets", "input_lengths", "target_lengths"),
    "cos": ("angles",),
    "sin": ("angles",),
}
_NUMBERED = re.compile(r"shared\d*")
_LONGEST = 24  # letters of an argument of a block that names what is given for it
# What changes a value and leaves it what it is.
_THROUGH = frozenset(
    "reshape transpose expand cast identity rotary rms_norm layer_norm repeat_heads".split()
)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the values of a graph that a name could tell, by tensor.

    roles:      what its readers see in it.
    assigned:   what the model's source calls it.
    statements: what the source calls the thing on the way to which it is.
    """

    roles: Mapping[str, str]
    assigned: Mapping[str, str]
    statements: Mapping[str, str]

    @staticmethod
    def of(lowered: Lowered) -> Known:
        return Known(roles(lowered), source_names(lowered), statement_names(lowered))


def unnamed(argument: str) -> bool:
    """Whether the name of a block's input says no more than that all layers read it."""
    return _NUMBERED.fullmatch(argument) is not None


def roles(lowered: Lowered) -> dict[str, str]:
    """Role by tensor, of those whose readers all see the same in them."""
    readers = lowered.graph.consumers()
    inside = {name: roles(body) for name, body in lowered.blocks.items()}
    role_of: dict[str, str] = {}

    def seen_by(reader: Op, place: int) -> str:
        if reader.kind == "block":
            block = reader.attrs["block"]
            graph = lowered.blocks[block].graph
            name = graph.inputs[place]
            stream = next((n for n in graph.inputs if graph.tensors[n].differentiable), "")
            own = name != stream and name.isidentifier() and len(name) <= _LONGEST
            own = own and not unnamed(name)
            return inside[block].get(name) or (name if own else "")
        known = _OPERANDS.get(reader.kind, ())
        if reader.attrs.get("documents") and place > 2:
            return "documents"
        if place < len(known) and known[place]:
            return known[place]
        after = role_of.get(reader.outputs[0], "")
        scaled = reader.kind in ("mul", "div") and len(reader.inputs) == 1
        joined = reader.kind == "cat" and after == "angles"  # those of both halves
        passed = place == 0 and (reader.kind in _THROUGH or scaled)
        return after if joined or passed else ""

    made = [name for op in reversed(lowered.graph.ops) for name in op.outputs]
    for name in (*made, *lowered.graph.inputs):
        seen = {seen_by(reader, place) for reader, place in readers[name]}
        given = {seen_by(r, place) for r, place in readers[name] if r.kind == "block"}
        if len(seen) == 1 or (len(given) == 1 and seen == given | {""}):
            role_of[name] = max(seen)
    return role_of
