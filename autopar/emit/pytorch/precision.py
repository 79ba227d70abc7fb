"""Where compute is in half precision: float32 values that meet the stream take its dtype.

`local` gives parameters in half precision and inputs come in it. The graph says which values stay
float32 all the same (`autopar.lowering.precision`): angles, masks, losses.
"""

from __future__ import annotations

from autopar.lowering.lowered import Lowered
from autopar.nouns.kinds import WIDE_LOSSES


def wide_values(lowered: Lowered, precision: str) -> dict[str, bool]:
    """For floating values: True where they are float32 when the program runs, False where half.

    What flows from losses alone is in neither class: it is in float32 and joins nothing else.
    """
    tensors = lowered.graph.tensors
    losses = _losses(lowered)
    wide = {}
    for tensor in tensors.values():
        if tensor.role == "parameter" or tensor.dtype == precision:
            wide[tensor.name] = False
        elif tensor.dtype == "float32" and tensor.name not in losses:
            wide[tensor.name] = True
    return wide


def _losses(lowered: Lowered) -> set[str]:
    """Losses, and what is computed from losses alone."""
    losses: set[str] = set()
    for op in lowered.ops:
        inputs = op.op.inputs
        if op.op.kind in WIDE_LOSSES or (inputs and all(name in losses for name in inputs)):
            losses.update(op.op.outputs)
    return losses
