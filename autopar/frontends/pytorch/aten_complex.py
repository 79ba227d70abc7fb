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

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.aten_elementwise import Arguments, Lift, Unliftable
from autopar.frontends.pytorch.aten_fourier import FOURIER
from autopar.frontends.pytorch.aten_lookups import LOOKUPS
from autopar.frontends.pytorch.aten_shapes import SHAPES, reshape_to
from autopar.frontends.pytorch.complex_forms import parts_of_complex
from autopar.frontends.pytorch.decomposed import lift_parts
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter
from autopar.torch_private.ops import op_name


def meets_complex(node: fx.Node) -> bool:
    """Whether an operand or a result of the call is complex."""
    return any(t.is_complex() for one in (node, *node.all_input_nodes) for t in _tensors(one))


def lift_complex(lifter: Lifter, node: fx.Node, arguments: Arguments) -> Any:
    """What the call becomes; raises `UnsupportedOpError` where it is not in the table."""
    name = op_name(node.target)
    start = len(lifter.nodes)
    with suppress(KeyError, Unliftable):
        return COMPLEX[name](lifter, node, arguments)
    del lifter.nodes[start:]
    known = parts_of_complex(node)
    if known is None:
        raise UnsupportedOpError(
            f"{lifter.source}: {name} on complex numbers is not supported: write it with real "
            "numbers (cos and sin), or with sums, products, abs and transforms of complex ones"
        )
    graph, operands = known
    return lift_parts(lifter, graph, map(lifter.read, operands), lifter.lifted)


def real_view(lifter: Lifter, held: Value) -> Value:
    """The pairs of a complex buffer."""
    call = {"target": "aten.view_as_real.default", "args": ["%0"], "kwargs": {}}
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


def _same(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    """The layout is the same, and so is the dtype; a real tensor gets an imaginary part of zeros,
    or a complex one loses its."""
    x: Value = next(iter(a.values()))
    made = ir.like(node.meta["val"])
    if made.dtype != x.dtype:
        raise Unliftable
    if made.shape == x.shape:
        return x
    if made.shape != (*x.shape, 2):
        return _parts(lifter, x)[0]
    zero = lifter.emit("full", [], x.shape, x.dtype, shape=x.shape, value=0.0, dtype=x.dtype)
    return _pair(lifter, x, zero)


def _polar(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    size, angle = a["abs"], a["angle"]
    turned = (lifter.emit(kind, [angle], angle.shape, angle.dtype) for kind in ("cos", "sin"))
    return _pair(lifter, *(lifter.emit("mul", [size, t], size.shape, size.dtype) for t in turned))


def _conjugate(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    real, imaginary = _parts(lifter, a["self"])
    return _pair(lifter, real, lifter.emit("neg", [imaginary], imaginary.shape, imaginary.dtype))


def _part(index: int) -> Lift:
    return lambda lifter, node, a: _parts(lifter, a["self"])[index]


def _as_pairs(name: str) -> Lift:
    """An op that works on dims: the same on pairs, its dims counted from the front."""

    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Any:
        rank = len(a["self"].shape) - 1
        if isinstance(a.get("dim"), int):
            a = {**a, "dim": a["dim"] % rank}
        return SHAPES[name](lifter, node, a)

    return lift


def _reshape(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    return reshape_to(lifter, next(iter(a.values())), ir.like(node.meta["val"]).shape)


def _expand(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    x, shape = a["self"], ir.like(node.meta["val"]).shape
    return x if x.shape == shape else lifter.emit("expand", [x], shape, x.dtype, shape=shape)


COMPLEX: dict[str, Lift] = {
    **{
        name: _same
        for name in (
            "view_as_complex view_as_real alias contiguous clone to _to_copy lift_fresh_copy "
            "detach resolve_conj"
        ).split()
    },
    "complex": lambda lifter, node, a: _pair(lifter, a["real"], a["imag"]),
    "polar": _polar,
    "conj": _conjugate,
    "_conj": _conjugate,
    "real": _part(0),
    "imag": _part(1),
    **{name: _as_pairs(name) for name in ("slice", "select", "narrow")},
    **{
        name: _reshape
        for name in (
            "view reshape _unsafe_view flatten unflatten squeeze unsqueeze _reshape_alias"
        ).split()
    },
    **{name: _expand for name in ("expand", "expand_as", "broadcast_to")},
    "index": LOOKUPS["index"],
    **FOURIER,
}
