"""What torch's engine of gradients knows of a backward that is going on."""

from collections.abc import Sequence
from typing import Any

import torch


def wanted(context: Any, tensors: Sequence[bool]) -> list[bool]:
    """Of each argument of a function whose backward runs, whether its gradient is asked for now;
    `needs_input_grad` says whether it ever is. ``tensors``: which arguments are.

    `torch.autograd.grad` does not tell of leaves: there all that ever is asked for is.
    """
    nodes = iter([node for node, _ in context.next_functions])
    following = [next(nodes) if tensor else None for tensor in tensors]
    try:
        return [n is not None and torch._C._will_engine_execute_node(n) for n in following]
    except RuntimeError:
        return list(context.needs_input_grad)
