"""Linear layers and the collective before or behind them as one call, where a plan has pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.emit.pytorch.site import EmitError
from autopar.lowering.lowered import Lowered, LoweredOp, LoweredTensor, Operand
from autopar.lowering.pieces import BEFORE, COPIED, GATHERED, REDUCED, SCATTERED, Site, sites
from autopar.nouns.graph import Op

IN_PIECES = "in_pieces"
"""The kind of such a call. Its operands are what the layers read, and then the parameters of each;
``held``: of each layer whether it has a bias."""
_CALLS = {
    GATHERED: ("gathered_linear", "gathered_linears"),
    COPIED: ("copied_linear", "copied_linears"),
    SCATTERED: ("linear_scattered",),
    REDUCED: ("linear_reduced",),
}


def in_pieces(lowered: Lowered) -> Lowered:
    """``lowered`` with one op for the layers beside each collective that runs in pieces; nothing
    moves any more between them and the tensor that it was of."""
    asked = {name for name, count in lowered.pieces.items() if count > 1}
    chosen = [site for site in sites(lowered) if site.key in asked] if asked else []
    for site in chosen:
        lowered = _joined(lowered, site, lowered.pieces[site.key])
    return lowered


def _joined(lowered: Lowered, site: Site, pieces: int) -> Lowered:
    value = lowered.tensors[site.name]
    target = next(
        (o.wanted for op in lowered.ops for o in op.operands if o.name == site.name and o.steps),
        value.shared,
    )
    ops = tuple(_unmoved(op, site.name) for op in lowered.ops)
    by_name = {op.op.name: op for op in ops}
    products = [by_name[op.op.name] for op in site.products]
    if site.kind in BEFORE:
        settled = LoweredTensor(value.tensor, value.produced, value.produced, ())
        operand = replace(products[0].operands[0], wanted=value.produced)
        results = tuple(r for op in products for r in op.results)
    else:
        settled = LoweredTensor(value.tensor, target, target, ())
        operand, results = products[0].operands[0], (target,)
    made = _call(site, products, operand, pieces)
    made = replace(made, results=results)
    gone = {op.op.name for op in products[1:]}
    every = tuple(
        made if op.op.name == made.op.name else op for op in ops if op.op.name not in gone
    )
    return replace(lowered, ops=every, tensors={**lowered.tensors, site.name: settled})


def _unmoved(op: LoweredOp, name: str) -> LoweredOp:
    """``op`` reading ``name`` as it is given."""
    if not any(o.name == name and o.steps for o in op.operands):
        return op
    operands = (replace(o, steps=()) if o.name == name else o for o in op.operands)
    return replace(op, operands=tuple(operands))


def _call(site: Site, products: Sequence[LoweredOp], operand: Operand, pieces: int) -> LoweredOp:
    """One op for all of ``products``, at the place of the first."""
    held = tuple(o for op in products for o in op.operands[1:])
    calls = _CALLS[site.kind]
    dim = {GATHERED: site.step.source.dim, SCATTERED: site.step.target.dim}.get(site.kind)
    operands = (operand, *held)
    attrs = {
        "call": calls[min(len(products), len(calls)) - 1],
        "held": tuple(len(op.operands) > 2 for op in products),
        "dim": dim,
        "axis": site.step.axis,
        "pieces": pieces,
    }
    outputs = tuple(name for op in products for name in op.op.outputs)
    if len(products) > 1 and len(calls) == 1:
        raise EmitError(f"{site.key}: {site.kind} of {len(products)} layers")
    names = tuple(o.name for o in operands)
    op = Op(IN_PIECES, names, outputs, attrs, products[0].op.source)
    return replace(products[0], op=op, operands=operands)
