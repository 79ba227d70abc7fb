"""Values of tensors that a forward makes from nothing but constants, found while it is traced.

A trace has no values. What is made from `arange`, `eye`, `ones` and the like alone has the same at
every step, so it is computed where a value is asked for. So is what a layer is given; the forward
of a layer that repeats runs for each of its calls, which are alike only if they do the same.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from autopar.torch_private.modes import FakeTensor, without_modes, without_torch_function
from autopar.torch_private.ops import schema_of
from autopar.torch_private.tensors import memory_of

DEPTH = 32
"""How many ops a constant may be made by."""
LARGEST = 1 << 24
"""Elements of the largest tensor on the way."""


def node_of(tensor: object) -> fx.Node | None:
    """The node of the trace that holds ``tensor``."""
    mode = get_proxy_mode()
    if mode is None or not isinstance(tensor, torch.Tensor):
        return None
    slot: Any = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


BatchValues = Mapping[fx.Node, torch.Tensor]
"""Entries of a batch, with values, by their places in the trace."""


def constant_of(
    tensor: torch.Tensor, batch: BatchValues = MappingProxyType({})
) -> torch.Tensor | None:
    """``tensor`` with values; None where it is made from more than constants, and entries of the
    ``batch`` where they are given. Use it `without_modes`."""
    node = node_of(tensor)
    if node is None or not (makers := _makers(node, batch)):
        return None
    values: dict[fx.Node, Any] = {n: _attribute(n) for n in makers if n.op == "get_attr"}
    values |= {n: given for n, given in batch.items() if n in makers}
    with without_modes(), without_torch_function(), torch.no_grad():
        for made in makers:
            if made in values:
                continue
            if (given := _given(made)) is not None:
                values[made] = values[given]
                continue
            args = fx.node.map_arg(made.args, values.__getitem__)
            kwargs = fx.node.map_arg(made.kwargs, values.__getitem__)
            values[made] = made.target(*args, **kwargs)  # type: ignore[operator]
    known = values[node]
    return known if isinstance(known, torch.Tensor) else None


def made_of(tensor: torch.Tensor, batch: BatchValues) -> list[fx.Node]:
    """The entries of the ``batch`` that `constant_of` reads."""
    node = node_of(tensor)
    return [] if node is None else [made for made in _makers(node, batch) if made in batch]


def _makers(node: fx.Node, batch: BatchValues) -> list[fx.Node]:
    """The ops that ``node`` is made by, each behind those that it reads; none where one draws,
    writes, or reads what is neither a constant nor of the ``batch``."""
    makers: dict[fx.Node, None] = {}

    def visit(made: fx.Node) -> bool:
        if made in makers:
            return True
        if made in batch and not is_written(made):
            makers[made] = None
            return True
        given = _given(made)
        if given is not None and not is_written(made) and visit(given):
            makers[made] = None
            return True
        if len(makers) > DEPTH or not _is_plain(made) or is_written(made):
            return False
        if not all(map(visit, made.all_input_nodes)):
            return False
        makers[made] = None
        return True

    return [*makers] if visit(node) else []


def _given(node: fx.Node) -> fx.Node | None:
    """What a layer is given of which ``node`` is the name inside of it."""
    mark: Any = node.args[0] if node.target is operator.getitem else None
    if getattr(mark, "target", None) is not torch.ops.autopar.enter.default:
        return None
    given: fx.Node = mark.args[0][node.args[1]]
    return given


def _attribute(node: fx.Node) -> Any:
    """What a node reads from outside of the trace."""
    mode: Any = get_proxy_mode()
    return operator.attrgetter(str(node.target))(mode.tracer.root)


def _is_plain(node: fx.Node) -> bool:
    if node.op == "get_attr":  # what a forward writes out, as `torch.tensor([2, 3])`
        held = _attribute(node)
        return isinstance(held, torch.Tensor) and not isinstance(held, FakeTensor)
    return is_computed(node) and not writes(node)


def is_computed(node: fx.Node) -> bool:
    """Whether it is an op of torch's that draws nothing, and whose results are not too large."""
    target: Any = node.target
    drawn = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    known = schema_of(target) is not None or target is operator.getitem
    if node.op != "call_function" or not known:
        return False
    made = node.meta.get("val")
    several = made if isinstance(made, list | tuple) else [made]
    return not drawn and all(map(_is_small, several))


def _is_small(made: object) -> bool:
    known = isinstance(made, torch.Tensor) and all(isinstance(n, int) for n in made.shape)
    return known and made.numel() <= LARGEST  # type: ignore[attr-defined]


def writes(node: fx.Node) -> bool:
    """Whether an op changes the memory of an operand."""
    schema = schema_of(node.target)
    own = node.target is torch.ops.aten.detach_.default  # of `torch.tensor`: no value is another
    return schema is not None and schema.is_mutable and not own


def is_written(node: fx.Node) -> bool:
    """Whether an op of the trace so far changes what ``node`` made, itself or through a view."""
    return any(node in written_by(u) or (_is_view(u, node) and is_written(u)) for u in node.users)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The operands that an op writes into; it may read others, as masks or values."""
    if node.op != "call_function" or not writes(node):
        return []
    arguments = schema_of(node.target).arguments
    given = {a.name: v for a, v in zip(arguments, node.args, strict=False)} | node.kwargs
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    operands: list[fx.Node] = []
    fx.node.map_arg([given.get(name) for name in written], operands.append)
    return operands


def _is_view(node: fx.Node, base: fx.Node) -> bool:
    made, given = node.meta.get("val"), base.meta.get("val")
    several = made if isinstance(made, list | tuple) else [made]
    tensors = [t for t in (*several, given) if isinstance(t, torch.Tensor)]
    places = [memory_of(t) for t in tensors]
    return len(places) > 1 and places[-1] in places[:-1]
