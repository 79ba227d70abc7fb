"""The experts of a layer as Python: a call, and a function for what lies between their products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autopar.emit.pytorch.elementwise import PRINTERS as ELEMENTWISE
from autopar.emit.pytorch.site import HEAVY, EmitError, Printer, Site
from autopar.emit.text import Expr, Lines, call, variable
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.lowering.routed_pieces import pieces_of

PIECES = "pieces"
"""The attr of calls whose tokens travel in pieces: how many."""
_READ = {"all": ("h",), "halves": ("gate", "up"), "pairs": ("gate", "up")}
_ABOUT = '"""What an expert does between its two products, element by element."""'


def _experts(site: Site) -> Expr:
    """``experts(x, index, weights, up, down, gate=gate_of_experts)``"""
    arguments = [a.text for a in site.args]
    arguments.append(f"gate={site.define('gate_of_experts', _gate(site))}")
    if site.attrs["reads"] != "halves":
        arguments.append(f'reads="{site.attrs["reads"]}"')
    arguments += ["transposed=True"] if site.attrs["transposed"] else []
    arguments += site.beside
    if PIECES in site.attrs:
        arguments.append(f"pieces={site.attrs[PIECES]}")
    return Expr(call("experts", arguments), weight=HEAVY)


def _gate(site: Site) -> str:
    """The function without ``def`` and its name; steps that are read twice are statements."""
    names, steps = _READ[site.attrs["reads"]], site.attrs["gate"]
    values = [variable(name) for name in names]
    reads = Counter(i for _, operands, _ in steps for i in operands)
    lines = Lines(4)
    lines.add(_ABOUT)
    for number, (kind, operands, attrs) in enumerate(steps, len(names)):
        expr = _step(site, kind, [values[i] for i in operands], attrs)
        if reads[number] > 1:
            later = {i for _, given, _ in steps[number - len(names) + 1 :] for i in given}
            free = [values[i].text for i in operands if i < len(names) and i not in later]
            name = free[0] if free else f"h{number}"
            lines.add(f"{name} = {expr.text}")
            expr = variable(name)
        values.append(expr)
    lines.add(f"return {values[-1].text}")
    arguments = ", ".join(f"{name}: Tensor" for name in names)
    return "\n".join([f"({arguments}) -> Tensor:", *lines.lines])


def _step(site: Site, kind: str, operands: list[Expr], attrs: Mapping[str, object]) -> Expr:
    printer = ELEMENTWISE.get(kind)
    if printer is None:
        raise EmitError(f"{site.at.op.name}: no printer for {kind!r} between products of experts")
    op = replace(site.at.op, kind=kind, attrs=attrs)
    return printer(replace(site, at=replace(site.at, op=op), args=tuple(operands)))


def tokens_in_pieces(lowered: Lowered) -> Lowered:
    """``lowered`` with calls that say in how many pieces their tokens travel."""
    if not lowered.expert_pieces:
        return lowered

    def counted(op: LoweredOp) -> LoweredOp:
        count = pieces_of(lowered, op)
        if count == 1:
            return op
        return replace(op, op=replace(op.op, attrs={**op.op.attrs, PIECES: count}))

    return replace(lowered, ops=tuple(map(counted, lowered.ops)))


PRINTERS: Mapping[str, Printer] = {"experts": _experts}
