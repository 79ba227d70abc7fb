"""An op without a rule as the ops that PyTorch itself makes of it.

PyTorch breaks composite ops up in its dispatcher, and keeps a table of decompositions for the
others (`torch._decomp`); `own_forms` has what both lack. Any is traced on the fakes of the op at
hand, and its ops are lifted in the place of the one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.frontends.pytorch.lifter import is_inplace, viewed
from autopar.frontends.pytorch.own_forms import own_form, without_copy
from autopar.rules.registry import registered_kinds
from autopar.rules.table import TABLE
from autopar.torch_private.modes import without_modes
from autopar.torch_private.ops import (
    OpOverload,
    breaks_itself_up,
    decompositions,
    op_name,
)

if TYPE_CHECKING:
    from autopar.frontends.pytorch.lifter import Lifter


WITH_OWN_GRADIENT = frozenset({"special_log_ndtr"})
"""Ops whose other form has no gradient that is a number: of two branches, the one that is not
chosen overflows."""


def parts_of(target: OpOverload, args: Any, kwargs: Any) -> fx.Graph | None:
    """The ops that ``target`` is made of, called on fakes; placeholders are its tensors in order.

    None where a rule is known for it as it is, where there is no other form of it, and where that
    form writes into tensors or needs their values.
    """
    kind = f"{target.namespace}::{op_name(target)}"
    if kind in registered_kinds() or op_name(target) in WITH_OWN_GRADIENT:
        return None
    own = own_form(target, args, kwargs)
    form = own or (None if kind in TABLE else _form(target))
    if form is None:
        return None
    tensors = list(_tensors((args, kwargs)))

    def run(*given: torch.Tensor) -> Any:
        put = iter(given)

        def filled(v: Any) -> Any:
            if isinstance(v, torch.Tensor):
                return next(put)
            if isinstance(v, list | tuple):
                return type(v)(map(filled, v))
            return v

        return form(*filled(args), **{k: filled(v) for k, v in kwargs.items()})

    try:
        with without_modes():
            # Composite ops of a form that is ours have rules as they are.
            made = make_fx(run, pre_dispatch=own is not None)(*tensors)
    except Exception:  # PyTorch's own code, on tensors without values
        return None
    nodes = [n for n in made.graph.nodes if n.op not in ("placeholder", "output")]
    for node in nodes:
        node.target = without_copy(node.target)
    plain = all(
        n.op == "call_function"
        and not (is_inplace(n.target) and not _is_fresh(n.args[0]))
        and (_is_part(n) or isinstance(n.target, OpOverload))
        and getattr(n.target, "namespace", "aten") == "aten"
        and (own is not None or n.target is not target)
        for n in nodes
    )
    (results,) = made.graph.output_node().args
    several = results if isinstance(results, list | tuple) else [results]
    plain = plain and all(isinstance(n, fx.Node) for n in several)  # and no lists among them
    return made.graph if plain and nodes else None


def lift_parts(
    lifter: Lifter, graph: fx.Graph, operands: Iterable[Any], lift: Callable[[fx.Node], Any]
) -> Any:
    """Emits the ops of ``graph``; its result, or a list of them."""
    given = iter(operands)
    for node in graph.nodes:
        if node.op == "placeholder":
            lifter.env[node] = next(given)
        elif node.op == "output":
            result = node.args[0]
            listed = isinstance(result, list | tuple)
            return [lifter.env[n] for n in result] if listed else lifter.env[result]
        elif node.target is operator.getitem:
            lifter.env[node] = lifter.env[node.args[0]][node.args[1]]
        else:
            lifter.env[node] = lift(node)
            if is_inplace(node.target):
                lifter.env[node.args[0]] = lifter.env[node]
    raise AssertionError("an fx graph ends in its output")


def _is_part(node: fx.Node) -> bool:
    """Whether it is one of an op's several results."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node)


def _is_fresh(node: Any) -> bool:
    """Whether an op before made the memory that ``node`` is written into."""
    return isinstance(node, fx.Node) and node.op == "call_function" and viewed(node) is None


def _form(target: OpOverload) -> Callable[..., Any] | None:
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if breaks_itself_up(target):
        return target.decompose
    table = decompositions()  # a mapping whose get() knows less than its []
    form: Callable[..., Any] | None = table[target] if target in table else None
    return form


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from _tensors(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _tensors(v)
