"""Parameters that no gradient reaches and the forward writes: a moving average of others, say.

The network of a momentum encoder or a teacher is made of parameters with ``requires_grad=False``,
which the forward itself moves. To a program these are buffers, see `carried`.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch import fx, nn

from autopar.frontends.pytorch.lift import TRANSFORMS
from autopar.frontends.pytorch.lifter import ASSIGNED, is_inplace, viewed
from autopar.frontends.pytorch.trace import Trace
from autopar.torch_private.ops import op_name


def averages_as_buffers(trace: Trace) -> Trace:
    """``trace``, in which untrained parameters that the forward writes are buffers."""
    written = _written(trace.graph, trace.root)
    named = {
        key: replace(one, role="buffer")
        if key in written and one.role == "parameter" and not one.tensor.requires_grad
        else one
        for key, one in trace.named.items()
    }
    return replace(trace, named=named)


def _written(graph: fx.Graph, root: nn.Module) -> set[int]:
    """By ``id``, the tensors of ``root`` into which an op writes, itself or through a view."""
    shares: dict[fx.Node, int] = {}
    written: set[int] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            shares[node] = id(operator.attrgetter(str(node.target))(root))
        if node.op != "call_function":
            continue
        if getattr(node.target, "__name__", "") in TRANSFORMS:
            break  # refused where it is lifted
        given: Any = node.args[0] if node.args else None
        into: Any = node.kwargs.get("out")
        writes = is_inplace(node.target) or op_name(node.target) == ASSIGNED
        target = into if isinstance(into, fx.Node) else given if writes else None
        base = viewed(node) if target is None else target
        if node.target is operator.getitem:
            base = given
        if base in shares:
            shares[node] = shares[base]
        if target in shares:
            written.add(shares[target])
    return written
