"""The experts of a layer as Python: a call, and a function for what lies between their products."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from autopar.emit.pytorch.gates import gate_function
from autopar.emit.pytorch.shared_experts import RUN_BESIDE
from autopar.emit.pytorch.site import HEAVY, Printer, Site
from autopar.emit.text import Expr, call
from autopar.lowering.lowered import Lowered, LoweredOp
from autopar.lowering.routed_pieces import pieces_of
from autopar.nouns.graph import Graph
from autopar.nouns.plan import key
from autopar.rules.expert_layers import expert_layers, matrices_of

PIECES = "pieces"
"""The attr of calls whose tokens travel in pieces: how many."""
LAYER = "layer"
"""The attr of calls whose experts are placed: the path of the module that holds the matrices."""
_READ = {"all": ("h",), "halves": ("gate", "up"), "pairs": ("gate", "up")}
_ABOUT = "What an expert does between its two products, element by element."


def _experts(site: Site) -> Expr:
    """``experts(x, index, weights, up, down, gate=gate_of_experts)``"""
    *arguments, last = [a.text for a in site.args]
    beside = [f"beside=lambda: {last}"] if RUN_BESIDE in site.attrs else []
    arguments += [] if beside else [last]
    gate = gate_function(site, _READ[site.attrs["reads"]], site.attrs["gate"], _ABOUT)
    arguments.append(f"gate={site.define('gate_of_experts', gate)}")
    if site.attrs["reads"] != "halves":
        arguments.append(f'reads="{site.attrs["reads"]}"')
    arguments += ["transposed=True"] if site.attrs["transposed"] else []
    arguments += site.beside
    if PIECES in site.attrs:
        arguments.append(f"pieces={site.attrs[PIECES]}")
    if LAYER in site.attrs:
        arguments.append(f"layer={site.attribute(site.attrs[LAYER])}")
    return Expr(call("experts", arguments + beside), weight=HEAVY)


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


def named_layers(lowered: Lowered, placed: Collection[str]) -> Lowered:
    """``lowered`` with calls that say which module holds their matrices, where these are among the
    ``placed`` ones (keys): routes are turned into places there."""
    if not placed:
        return lowered

    def named(op: LoweredOp) -> LoweredOp:
        if op.op.kind != "experts" or key(lowered.block, matrices_of(op.op)[0]) not in placed:
            return op
        module, _, _ = matrices_of(op.op)[0].rpartition(".")
        attrs = {**op.op.attrs, LAYER: module}
        return replace(op, op=replace(op.op, attrs=attrs))

    return replace(lowered, ops=tuple(map(named, lowered.ops)))


def placed_matrices(graph: Graph, placement: Collection[str]) -> frozenset[str]:
    """Keys of the matrices of layers whose experts a plan places by their rows."""
    return frozenset(
        key(layer.block, name)
        for layer in expert_layers(graph)
        if any(module in placement for module in layer.modules)
        for name in layer.matrices
    )


PRINTERS: Mapping[str, Printer] = {"experts": _experts}
