"""The model's own tensors as a trace names them: parameters, buffers, and constants."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.aten_complex import real_view
from autopar.frontends.pytorch.calls import NotAlike
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter
from autopar.frontends.pytorch.recording import answered


def model_tensor(lifter: Lifter, node: fx.Node) -> Value:
    """What a ``get_attr`` node names; the same value for every node that names it.

    Raises `UnsupportedOpError` for a generator, and for a tensor made outside of the model whose
    numbers a trace does not have; `NotAlike` where a layer's tensor is used outside of it.
    """
    tensor = operator.attrgetter(str(node.target))(lifter.trace.root)
    if isinstance(tensor, torch.Generator):
        raise UnsupportedOpError(
            f"{lifter.source}: random numbers from a generator of their own, whose state is no "
            "part of a program: draw them without generator=, or give them in the batch"
        )
    known = lifter.values.get(id(tensor))
    if known is not None:
        return known
    named = lifter.trace.named.get(id(tensor))
    value = ir.like(tensor)
    if named is not None:
        value.role = "parameter" if named.role == "parameter" else "buffer"
        value.name = named.name
        value.trainable = tensor.requires_grad
        if tensor.is_complex() and value.role == "buffer":
            value.shape, value.dtype = tuple(tensor.shape), ir.dtype_name(tensor.dtype)
            value = real_view(lifter, value)
    else:
        value = _constant(lifter, tensor, value)
    lifter.values[id(tensor)] = value
    return value


def _constant(lifter: Lifter, tensor: torch.Tensor, like: Value) -> Value:
    """A tensor that the model does not hold by a name, as a constant of the graph."""
    answer = answered(tensor)
    if answer is not None:
        why = "a tensor of the layer is used outside without being returned"
        raise NotAlike(answer[0], why, leaked=answer[1])
    real = getattr(tensor, "constant", tensor)
    if real is None:
        raise UnsupportedOpError(
            f"{lifter.source}: a tensor made outside the model and the batch is used, or one "
            "is read by .data: register it as a buffer, and write .detach() for .data"
        )
    if real.is_complex():
        real = torch.view_as_real(real.resolve_conj())
    data = real.detach().to(torch.float64 if real.dtype.is_floating_point else real.dtype)
    return lifter.emit(
        "constant", [], like.shape, like.dtype, value=data.tolist(), dtype=like.dtype
    )
