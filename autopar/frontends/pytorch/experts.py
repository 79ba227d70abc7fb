"""The experts of a layer as Hugging Face's transformers writes them: one op of the graph.

Its modelling files decorate the class of a layer's experts, whose forward then looks for a function
of the name that the config gives in a table. While a model is traced our own stands there. It
writes ``autopar::experts(tensors, number)`` into the trace, and what the call is into a list:
the library's own forwards either read the routes' values or sort all tokens of the batch by their
expert, and neither can be split over tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from autopar.frontends.pytorch.build import is_internal
from autopar.frontends.pytorch.calls import Calls
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.experts_known import Known, known
from autopar.frontends.pytorch.experts_tried import TOLERANCE, differs
from autopar.frontends.pytorch.functions import Applied, written
from autopar.frontends.pytorch.known_forwards import replaced
from autopar.torch_private.modes import FakeTensorMode, without_torch_function

_LIBRARY = "transformers.integrations.moe"
_DECORATED = "_is_expert_parallel"
"""An attribute of the modules whose forward looks into the table."""
_ROWS = 3
"""Of the tensor that a gate is traced on; no width is as small."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What lies between the two products of an expert, as ops on ``[rows, width]``.

    Gates are equal where their texts are, whatever the graphs' identities.
    """

    text: str
    graph: fx.Graph = field(compare=False)
    root: nn.Module = field(compare=False)


@dataclass(frozen=True, slots=True)
class CalledExperts:
    """One call of a layer's experts. ``name``: of the class.

    transposed: matrices are stored [in, out], else [out, in].
    bias:       both products add one.
    """

    name: str
    gate: Gate
    transposed: bool
    bias: bool


torch.library.define("autopar::experts", "(Tensor[] tensors, int number) -> Tensor[]")


@contextmanager
def kept_experts(
    called: list[CalledExperts], model: nn.Module, mode: FakeTensorMode, calls: Calls
) -> Iterator[None]:
    """Inside, every call of experts writes one op into the trace and what it is into ``called``.

    In a repeated layer it is one of the calls by which layers are compared. Raises
    `UnsupportedOpError` for experts that do more than two products with a gate between them, which
    one call of each class on drawn numbers tells.
    """
    modules = list(model.modules())
    described = {id(m): _description(m, mode) for m in modules if hasattr(m, _DECORATED)}
    rows = {id(m): (row, _of_known(m, row, mode)) for m in modules if (row := known(m))}

    def call(description: CalledExperts, tensors: tuple[Tensor, ...]) -> Tensor:
        def write(*tensors: Tensor) -> Tensor:
            calls.note(_caller())
            called.append(description)
            op = torch.ops.autopar.experts.default
            with without_torch_function():  # none of these calls is the layer's
                graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
                (made,) = written(op, tensors, len(called) - 1, [tensors[0]], [graded], mode)
            return made

        if calls.current is not None:
            made: Tensor = calls.current.call(Applied(description, write), tensors, {})
            return made
        return write(*tensors)

    def forward(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return call(described[id(module)], (x, index, weights, *_parameters(module)))

    def instead(module: nn.Module) -> Callable[..., Any] | None:
        row, description = rows.get(id(module), (None, None))
        if row is None or description is None:
            return None
        return partial(row.computes, module, lambda *tensors: call(description, tensors))

    classes = {type(m) for m in modules if id(m) in rows}
    with ExitStack() as stack:
        stack.enter_context(
            chosen_experts(lambda own: forward if get_proxy_mode() is not None else own)
        )
        for kind in classes:
            stack.enter_context(replaced(kind, "forward", instead))
        yield


@contextmanager
def chosen_experts(choose: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, every layer's experts run what ``choose`` gives for their class's own forward, which
    loops over experts in plain torch; whatever their configs name."""
    library = sys.modules.get(_LIBRARY)
    table = getattr(library, "ALL_EXPERTS_FUNCTIONS", None)
    if table is None:  # no such library, or one from before it had a table
        yield
        return
    before = vars(table).get("get_interface")
    table.get_interface = lambda name, default: choose(default)
    try:
        yield
    finally:
        del table.get_interface
        if before is not None:
            table.get_interface = before


def _caller() -> FrameType | None:
    """The frame that called a layer's experts: behind ours and the library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        is_internal(frame.f_code.co_filename) or frame.f_globals.get("__name__") == _LIBRARY
    ):
        frame = frame.f_back
    return frame


def _description(module: Any, mode: FakeTensorMode) -> CalledExperts:
    name = type(module).__name__
    if module.has_post_expert_norm:
        raise UnsupportedOpError(
            f"{name} has a norm behind each expert's second product, which no plan can say yet: "
            "plan the model without it, or write the experts with tensor ops of your own"
        )
    shapes = {name: getattr(module, name).shape for name in _names(module)}
    with chosen_experts(lambda own: own):
        error = differs(module, shapes)
    if error is not None and error > TOLERANCE:
        raise UnsupportedOpError(
            f"{name}.forward computes something else than its decorator says, two products with a "
            f"gate between them, weighted and added: on drawn numbers {error:.1e} apart. Without "
            "the decorator, written with tensor ops alone, it is planned as it stands"
        )
    first = _parameters(module)[0]
    width = first.shape[2] if module.is_transposed else first.shape[1]

    def between(h: Tensor) -> Tensor:
        made: Tensor = module._apply_gate(h) if module.has_gate else module.act_fn(h)
        return made

    gate = _gate(between, width, first.dtype, mode)
    return CalledExperts(name, gate, module.is_transposed, module.has_bias)


def _of_known(module: nn.Module, row: Known, mode: FakeTensorMode) -> CalledExperts:
    name, share = type(module).__name__, row.drops(module)
    if share and module.training:
        raise UnsupportedOpError(
            f"{name} drops {share:g} of what lies between or behind the products of its experts, "
            "which no plan can say yet: set that dropout of the config to 0"
        )
    gate = _gate(partial(row.between, module), row.width(module), _dtype(module), mode)
    return CalledExperts(name, gate, row.transposed, row.bias)


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def _gate(
    between: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, mode: FakeTensorMode
) -> Gate:
    with mode:
        rows = torch.empty(_ROWS, width, dtype=dtype)
        traced = make_fx(between, pre_dispatch=True)(rows)
    return Gate(str(traced.graph), traced.graph, traced)


def _parameters(module: Any) -> list[Tensor]:
    return [getattr(module, name) for name in _names(module)]


def _names(module: Any) -> list[str]:
    """The matrices of both products, then their biases where there are any."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    names = [first, "down_proj"]
    if module.has_bias:
        names += [f"{name}_bias" for name in names]
    return names
