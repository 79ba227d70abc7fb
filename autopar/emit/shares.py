"""What a rank gives of the loss: data ranks and microbatches add up what each of them gives."""

from __future__ import annotations

from autopar.lowering.lowered import BATCH_AXES, Lowered, Operand


def copies(loss: Operand, lowered: Lowered) -> int:
    """How many data ranks and microbatches hold the same whole loss, each to give a share."""
    count = 1
    for axis in lowered.mesh.axes:
        if axis in BATCH_AXES and loss.wanted.on(axis).kind != "P":
            count *= lowered.mesh.size(axis)
    return count
