"""Buffers that a forward updates: written when the step has ended, not before.

So every microbatch of a step starts from the same buffer, a forward that runs again in backward
does what it did at first, and an evaluation leaves nothing behind.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LEFT = "_left_for_next_step"


def carry(module: nn.Module, **value: Tensor) -> Tensor:
    """``carry(self.norm, u=value)``: from the next step on buffer ``u`` of ``module`` holds
    ``value``, which is given back. In evaluation nothing is kept."""
    ((name, tensor),) = value.items()
    if module.training:
        left = getattr(module, _LEFT, None)
        if left is None:
            left = {}
            setattr(module, _LEFT, left)
        left[name] = tensor.detach()
    return tensor


@torch.no_grad()
def write_carried(model: nn.Module) -> None:
    """Writes what the last forward of ``model`` has left for the next step."""
    every: list[tuple[Tensor, Tensor]] = []
    for module in model.modules():
        left = getattr(module, _LEFT, {})
        every += [(module.get_buffer(name), value) for name, value in left.items()]
        left.clear()
    written = {_memory(buffer) for buffer, _ in every}
    # One buffer may be what another held before.
    values = [value.clone() if _memory(value) in written else value for _, value in every]
    for (buffer, _), value in zip(every, values, strict=True):
        buffer.copy_(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
