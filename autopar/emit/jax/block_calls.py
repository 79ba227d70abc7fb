"""Calls of functions that a program has: of a block's, of branches, loops and scans over bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.emit.constants import literal
from autopar.emit.jax import loops
from autopar.emit.jax.places import body_key
from autopar.emit.jax.shapes import grouped, tuple_of
from autopar.emit.jax.steps import call
from autopar.emit.text import Expr
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.nouns.graph import Op
from autopar.nouns.kinds import (
    AGAIN,
    CARRIED,
    LENGTH,
    REVERSE,
    SCAN,
    STACKED,
    SWITCH,
    TAKES,
)
from autopar.nouns.plan import key


def block_call(
    op: LoweredOp,
    inputs: Sequence[Expr],
    lowered: Lowered,
    functions: Mapping[str, str],
    parameters: str,
) -> Expr:
    """One layer; ``parameters``: the name of the dict of all."""
    block = lowered.graph.blocks[op.op.attrs["block"]]
    place = loops.place(block, op.op.attrs["instance"])
    stack = f"{parameters}[{literal(block.name)}]"
    arguments = ", ".join(x.text for x in inputs)
    return Expr(f"layer({functions[block.name]}, {stack}, {place}, {arguments})")


def body_call(
    op: LoweredOp, inputs: Sequence[Expr], block: str | None, functions: Mapping[str, str]
) -> Expr:
    """A branch, a loop or a scan over the functions that its bodies are."""
    place = key(block, op.op.name)
    takes = op.op.attrs[TAKES]
    names = [functions[body_key(place, i)] for i in range(len(takes))]
    given = [x.text for x in inputs]
    if op.op.kind == SWITCH:
        rest = "".join(f", {x}" for x in given[1:])
        return Expr(f"lax.switch({given[0]}, ({', '.join(names)}){rest})")
    if op.op.kind == SCAN:
        return _scan(op, given, names[0])
    carried = op.op.attrs[CARRIED]
    several = len(carried) > 1
    made = []
    for name, some in zip(names, takes, strict=True):
        fixed = [given[i] for i in some if i not in carried]
        arguments = ", ".join([*fixed, "*carry" if several else "carry"])
        made.append(f"lambda carry: {name}({arguments})" if fixed or several else name)
    carry = ", ".join(given[i] for i in carried)
    return Expr(f"lax.while_loop({', '.join(made)}, {f'({carry})' if several else carry})")


def _scan(op: LoweredOp, given: Sequence[str], step: str) -> Expr:
    """``lax.scan(partial(step, w), h, x)``: what does not change is brought once. A carry, and what
    a step has of the stacks, are a tuple where they are not one array."""
    attrs = op.op.attrs
    carried, stacked = attrs[CARRIED], attrs[STACKED]
    fixed = [x for i, x in enumerate(given) if i not in carried and i not in stacked]
    step = f"jax.checkpoint({step})" if attrs.get(AGAIN) else step
    step = f"partial({', '.join([step, *fixed])})" if fixed else step
    begin, rows = ([given[i] for i in some] for some in (carried, stacked))
    how = "" if stacked else f", length={attrs[LENGTH]}"
    how += ", reverse=True" if attrs[REVERSE] else ""
    taken = tuple_of(rows) if rows else "None"
    part = "" if len(op.op.outputs) > 1 else "[0]" if carried else "[1]"
    return Expr(f"lax.scan({step}, {tuple_of(begin)}, {taken}{how}){part}")


def targets(op: Op, names: Sequence[str]) -> str:
    """What stands on the left of an op with several results: a scan gives carries and stacks."""
    return grouped(names, len(op.attrs[CARRIED]) if op.kind == SCAN else None)


def between(run: loops.Run, lowered: Lowered, scatters: Mapping[str, int]) -> str:
    """What happens to the carry from one layer of a loop to the next."""
    if not any(run.between):
        return ""
    names = ["x"] if len(run.between) == 1 else [f"x{i}" for i in range(len(run.between))]
    moved = []
    carried = [run.ops[1].op.inputs[i] for i in run.carried]
    for tensor, name, steps in zip(carried, names, run.between, strict=True):
        for step in steps:
            name = call(step, name, lowered, tensor, scatters)
        moved.append(name)
    result = moved[0] if len(moved) == 1 else f"({', '.join(moved)})"
    return f", between=lambda {', '.join(names)}: {result}"
