"""The experts of a layer as Python: a call, and a function for what lies between their products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.emit.pytorch.gates import gate_function
from autopar.emit.pytorch.site import HEAVY, Printer, Site
from autopar.emit.text import Expr, call
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.lowering.routed_pieces import pieces_of

PIECES = "pieces"
"""The attr of calls whose tokens travel in pieces: how many."""
_READ = {"all": ("h",), "halves": ("gate", "up"), "pairs": ("gate", "up")}
_ABOUT = "What an expert does between its two products, element by element."


def _experts(site: Site) -> Expr:
    """``experts(x, index, weights, up, down, gate=gate_of_experts)``"""
    arguments = [a.text for a in site.args]
    gate = gate_function(site, _READ[site.attrs["reads"]], site.attrs["gate"], _ABOUT)
    arguments.append(f"gate={site.define('gate_of_experts', gate)}")
    if site.attrs["reads"] != "halves":
        arguments.append(f'reads="{site.attrs["reads"]}"')
    arguments += ["transposed=True"] if site.attrs["transposed"] else []
    arguments += site.beside
    if PIECES in site.attrs:
        arguments.append(f"pieces={site.attrs[PIECES]}")
    return Expr(call("experts", arguments), weight=HEAVY)


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
