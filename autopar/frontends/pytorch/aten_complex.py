"""Complex numbers, as people write rotary embeddings: pairs of real numbers in one more dim.

A complex tensor [...] of the model is a real value [..., 2] here, real part first, as
``torch.view_as_real`` lays it out. What has the same form on pairs, or one of its own, stands in
the table below; `complex_forms` computes by real and imaginary parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch.aten_call import Call, Lift, Unliftable, torch_call
from autopar.frontends.pytorch.aten_fourier import FOURIER
from autopar.frontends.pytorch.aten_lookups import LOOKUPS
from autopar.frontends.pytorch.aten_shapes import SHAPES
from autopar.frontends.pytorch.complex_forms import parts_of_complex
from autopar.frontends.pytorch.decomposed import lift_parts
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter
from autopar.torch_private.ops import op_name


def meets_complex(node: fx.Node) -> bool:
    """Whether an operand or a result of the call is complex."""
    return any(t.is_complex() for one in (node, *node.all_input_nodes) for t in _tensors(one))


def lift_complex(call: Call) -> Any:
    """What the call becomes; raises `UnsupportedOpError` where it is not in the table."""
    name, lifter = op_name(call.node.target), call.lifter
    start = len(lifter.nodes)
    with suppress(KeyError, Unliftable):
        return COMPLEX[name](call)
    del lifter.nodes[start:]
    known = parts_of_complex(call.node)
    if known is None:
        raise UnsupportedOpError(
            f"{lifter.source}: {name} on complex numbers is not supported: write it with real "
            "numbers (cos and sin), or with sums, products, abs and transforms of complex ones"
        )
    graph, operands = known
    return lift_parts(lifter, graph, map(lifter.read, operands), lifter.lifted)


def real_view(lifter: Lifter, held: Value) -> Value:
    """The pairs of a complex buffer."""
    call = torch_call("aten.view_as_real.default", "%0")
    dtype = {"complex64": "float32", "complex128": "float64"}[held.dtype]
    return lifter.emit("aten::view_as_real", [held], (*held.shape, 2), dtype, torch=call)


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    value = node.meta.get("val")
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, torch.Tensor):
            yield part


def _parts(lifter: Lifter, z: Value) -> list[Value]:
    dim = len(z.shape) - 1
    return [
        lifter.emit("select", [z], z.shape[:-1], z.dtype, dim=dim, index=index) for index in (0, 1)
    ]


def _pair(lifter: Lifter, real: Value, imaginary: Value) -> Value:
    shape = real.shape
    return lifter.emit("stack", [real, imaginary], (*shape, 2), real.dtype, dim=len(shape))


def _same(call: Call) -> Value:
    """The layout is the same, and so is the dtype; a real tensor gets an imaginary part of zeros,
    or a complex one loses its."""
    x, made, lifter = call.x, call.made, call.lifter
    if made.dtype != x.dtype:
        raise Unliftable
    if made.shape == x.shape:
        return x
    if made.shape != (*x.shape, 2):
        return _parts(lifter, x)[0]
    return _pair(lifter, x, lifter.full(x.shape, 0.0, x.dtype))


def _polar(call: Call) -> Value:
    like, (length, angle) = call.lifter.emit_like, _spread(call, "abs", "angle")
    turned = (like(kind, angle) for kind in ("cos", "sin"))
    return _pair(call.lifter, *(like("mul", length, t) for t in turned))


def _spread(call: Call, *names: str) -> list[Value]:
    """Operands in the shape of the result."""
    return [call.lifter.expand(call[name], call.made.shape[:-1]) for name in names]


def _conjugate(call: Call) -> Value:
    real, imaginary = _parts(call.lifter, call["self"])
    return _pair(call.lifter, real, call.lifter.emit_like("neg", imaginary))


def _part(index: int) -> Lift:
    return lambda call: _parts(call.lifter, call["self"])[index]


def _as_pairs(name: str) -> Lift:
    """An op that works on dims: the same on pairs, its dims counted from the front."""

    def lift(call: Call) -> Any:
        rank = len(call["self"].shape) - 1
        if isinstance(call.get("dim"), int):
            call = call.but(dim=call["dim"] % rank)
        return SHAPES[name](call)

    return lift


def _reshape(call: Call) -> Value:
    return call.lifter.reshape(call.x, call.made.shape)


COMPLEX: dict[str, Lift] = {
    **{
        name: _same
        for name in (
            "view_as_complex view_as_real alias contiguous clone to _to_copy lift_fresh_copy "
            "detach resolve_conj"
        ).split()
    },
    "complex": lambda call: _pair(call.lifter, *_spread(call, "real", "imag")),
    "polar": _polar,
    "conj": _conjugate,
    "_conj": _conjugate,
    "real": _part(0),
    "imag": _part(1),
    **{
        name: _as_pairs(name)
        for name in "slice select narrow split split_with_sizes chunk tensor_split unbind".split()
    },
    **{
        name: _reshape
        for name in (
            "view reshape _unsafe_view flatten unflatten squeeze unsqueeze _reshape_alias"
        ).split()
    },
    **{name: Call.spread for name in ("expand", "expand_as", "broadcast_to")},
    "index": LOOKUPS["index"],
    **FOURIER,
}
