"""Complex numbers, as people write rotary embeddings: pairs of real numbers in one more dim.

A complex tensor [...] of the model is a real value [..., 2] here, real part first, as
``torch.view_as_real`` lays it out. Only what stands in the table below works on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.aten_elementwise import Arguments, Lift, Unliftable
from autopar.frontends.pytorch.aten_fourier import FOURIER
from autopar.frontends.pytorch.aten_lookups import LOOKUPS
from autopar.frontends.pytorch.aten_shapes import SHAPES, reshape_to
from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter


def meets_complex(node: fx.Node) -> bool:
    """Whether an operand or a result of the call is complex."""
    return any(t.is_complex() for one in (node, *node.all_input_nodes) for t in _tensors(one))


def lift_complex(lifter: Lifter, node: fx.Node, arguments: Arguments) -> Any:
    """What the call becomes; raises `UnsupportedOpError` where it is not in the table."""
    name = node.target._opname  # type: ignore[union-attr]
    try:
        return COMPLEX[name](lifter, node, arguments)
    except (KeyError, Unliftable):
        raise UnsupportedOpError(
            f"{lifter.source}: {name} on complex numbers is not supported; those that are: "
            f"{', '.join(sorted(COMPLEX))}. Write it with real numbers (cos and sin)"
        ) from None


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
    """The layout is the same, and so is the dtype."""
    x: Value = next(iter(a.values()))
    if ir.like(node.meta["val"]).dtype != x.dtype:
        raise Unliftable
    return x


def _mul(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
    meta = ir.like(node.meta["val"])
    shape = meta.shape[:-1]
    if isinstance(number := a["other"], int | float):
        return lifter.emit("mul", [a["self"]], meta.shape, meta.dtype, other=number)

    def combined(kind: str, x: Value, y: Value) -> Value:
        return lifter.emit(kind, [x, y], shape, meta.dtype)

    operands: list[list[Value]] = []
    for name, given in zip(("self", "other"), node.args, strict=True):
        if not isinstance(given, fx.Node):
            raise Unliftable
        plain = not any(t.is_complex() for t in _tensors(given))
        operands.append([a[name]] if plain else _parts(lifter, a[name]))
    left, right = sorted(operands, key=len)
    if len(left) == 1:  # a real factor
        return _pair(lifter, *(combined("mul", left[0], part) for part in right))
    (a_real, a_imaginary), (b_real, b_imaginary) = operands
    return _pair(
        lifter,
        combined("sub", combined("mul", a_real, b_real), combined("mul", a_imaginary, b_imaginary)),
        combined("add", combined("mul", a_real, b_imaginary), combined("mul", a_imaginary, b_real)),
    )


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
    "mul": _mul,
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
