"""Ops of one module in one run, where they depend on nothing in between.

A frontend puts an op in front of its first reader, which may be deep inside of another module:
angles that a later layer is the first to use. Such guests move in front of their host, where that
is one call of a module with parameters.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.lowering.scopes import module_path, prefixes, under
from autopar.nouns.kinds import DRAWS


def gather_modules(lowered: Lowered) -> Lowered:
    """``lowered`` with its ops in an order that breaks up fewer modules."""
    ops = list(lowered.ops)
    paths = dict.fromkeys(p for op in ops for p in prefixes(module_path(op)))
    for path in sorted(paths, key=lambda p: p.count(".")):
        ops = _without_guests(ops, path, lowered)
    return replace(lowered, ops=tuple(ops))


def _without_guests(ops: list[LoweredOp], path: str, lowered: Lowered) -> list[LoweredOp]:
    """Ops of ``path`` unbroken; as they are where a guest needs its host, or is no plain op."""
    places = [i for i, op in enumerate(ops) if under(module_path(op), path)]
    run = ops[places[0] : places[-1] + 1]
    own = [op for op in run if under(module_path(op), path)]
    guests = [op for op in run if not under(module_path(op), path)]
    made = {name for op in own for name in op.op.outputs}
    tensors = lowered.graph.tensors
    read = [n for op in own for n in op.op.inputs if tensors[n].role == "parameter"]
    owned = [n for n in read if under(n, path)]
    if not owned or len(owned) != len(set(owned)):
        return ops  # called more than once, or not a layer at all
    for guest in guests:
        if made.intersection(guest.op.inputs) or guest.op.kind in {"block", *DRAWS}:
            return ops
    return [*ops[: places[0]], *guests, *own, *ops[places[-1] + 1 :]]
