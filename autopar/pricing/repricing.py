"""The searchers' objective of a plan, added up again op by op on the unfolded graph.

Independent of `autopar.planner.problem.folding`: it reads the `Lowered` stage that the emitter
prints. A searcher's claimed cost must equal this number, to the picosecond.
"""

from __future__ import annotations

from autopar.lowering.lowered import Lowered, stored
from autopar.lowering.pieces import Layers
from autopar.nouns.plan import key
from autopar.pricing.op_prices import op_ps
from autopar.pricing.prices import Prices
from autopar.pricing.state_prices import StatePrices
from autopar.pricing.tp_pieces import saved_on_the_way
from autopar.rules.narrow_gathers import narrow_weights


def objective(lowered: Lowered, prices: Prices, state: StatePrices) -> int:
    """Picoseconds of one optimizer step, additive: nothing overlaps."""
    once = _activations(lowered, prices)
    return once * lowered.passes + _parameters(lowered, state)


def _activations(lowered: Lowered, prices: Prices) -> int:
    """One microbatch through ``lowered``, every call of every block counted."""
    total = 0
    tensors = lowered.graph.tensors
    bodies = {name: _activations(body, prices) for name, body in lowered.blocks.items()}
    fusion, scope = prices.fusion, lowered.block
    layers = Layers.of((op.op for op in lowered.ops), (o.name for o in lowered.outputs), tensors)
    for name, value in lowered.tensors.items():
        handed = key(scope, name) in fusion.handed
        at = value.produced, value.shared
        total -= saved_on_the_way(prices, lowered, layers, name, value.steps, at)
        total += sum(prices.steps(value.steps, value.tensor, value.tensor.differentiable, handed))
    for op in lowered.ops:
        for i, operand in enumerate(op.operands):
            tensor, grad = tensors[operand.name], operand.differentiable
            if len(layers.readers[operand.name]) == 1 and operand.name not in layers.returned:
                at = lowered.tensors[operand.name].shared, operand.wanted
                total -= saved_on_the_way(prices, lowered, layers, operand.name, operand.steps, at)
            total += sum(prices.steps(operand.steps, tensor, grad, fusion.takes(scope, op.op, i)))
        own = (
            bodies[op.op.attrs["block"]] if op.bound is None else op_ps(prices, op, tensors, scope)
        )
        total += own
    for operand in lowered.outputs:
        moved = prices.steps(operand.steps, tensors[operand.name], operand.differentiable)
        total += sum(moved)
    return total


def _parameters(lowered: Lowered, state: StatePrices) -> int:
    total, narrow = 0, narrow_weights(lowered.graph)
    for name, value in lowered.tensors.items():
        if value.tensor.role == "parameter":
            total += state.price(value.tensor, stored(value.produced), name in narrow)
    for name, body in lowered.blocks.items():
        copies = len(dict.fromkeys(lowered.graph.blocks[name].instances))
        total += _parameters(body, state) * copies
    return total
