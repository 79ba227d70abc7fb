"""Ops on complex numbers as ops on their real and imaginary parts, written with torch itself.

A complex operand comes as pairs [..., 2] and a complex result leaves as pairs. Most ops are linear
in what is complex, and do to each part what they do to the whole; products of two complex operands
are four of their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.torch_private.modes import without_modes
from autopar.torch_private.ops import op_name, overload_name

_LINEAR = frozenset(
    "add sub rsub neg sum mean cat stack flip roll permute transpose t swapaxes movedim mT "
    "numpy_T where tril triu zeros_like empty_like new_zeros zeros empty pad constant_pad_nd "
    "cumsum index_select gather index_add masked_fill diagonal repeat tile "
    "copy unfold slice_scatter select_scatter".split()
)
"""Each part of the result is the op of that part of what is complex; what is real has no imaginary
part."""
_BILINEAR = frozenset("mul multiply matmul mm bmm mv dot einsum outer".split())
_DIVIDING = ("div", "true_divide")
_SHIFTING = frozenset("add sub rsub masked_fill where pad constant_pad_nd".split())
"""Of these a real number is no factor: it is in the real part of the result alone."""
_INDEXED = frozenset("index_select gather index_add".split())
"""Of these integers are places, the same for both parts."""


def parts_of_complex(node: fx.Node) -> tuple[fx.Graph, list[fx.Node]] | None:
    """The ops on pairs that ``node`` is, and its tensor operands in the order of the placeholders;
    None where it is not known how."""
    form = form_of(node)
    if form is None:
        return None
    operands = [*dict.fromkeys(node.all_input_nodes)]
    fakes = [_pairs(n.meta["val"]) for n in operands]

    def run(*given: Tensor) -> Any:
        held = dict(zip(operands, given, strict=True))
        args = fx.node.map_arg(node.args, held.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, held.__getitem__)
        return form(args, kwargs)

    with without_modes():
        return make_fx(run)(*fakes).graph, operands


def form_of(node: fx.Node) -> Callable[[Any, Any], Any] | None:
    """What computes ``node`` from arguments in which complex tensors are pairs."""
    target: Any = node.target
    name = op_name(target)
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
        target = getattr(getattr(torch.ops.aten, name, None), overload_name(target), None)
    if target is None:
        return None
    if name == "linear":
        return _applied(node, target, _with_bias)
    if name in _BILINEAR and sum(_kinds(node.args)) < 3:
        return _applied(node, target, _product)
    if name in _DIVIDING:
        divisor: Any = node.args[1]
        by_complex = isinstance(divisor, complex) or True in _kinds(divisor)
        return _applied(node, target, _quotient if by_complex else _product)
    if name in _LINEAR and _is_complex(node):
        return _applied(node, target, _by_parts)
    if name == "stft" and overload_name(target) == "default":
        of_real = True not in _kinds(node.args) and not any(node.args[8:])
        return (lambda args, kwargs: _short_time(*args, **kwargs)) if of_real else None
    special = _SPECIAL.get(name)
    return None if special is None else (lambda args, kwargs: special(args[0]))


class _Parts:
    """A complex tensor among arguments."""

    def __init__(self, pairs: Tensor) -> None:
        self.real, self.imag = pairs.select(-1, 0), pairs.select(-1, 1)


class _Real:
    """A real tensor among arguments of an op that has complex ones."""

    def __init__(self, tensor: Tensor) -> None:
        self.real = tensor

    @property
    def imag(self) -> Tensor:
        return torch.zeros_like(self.real)


Op = Callable[..., Tensor]


def _applied(
    node: fx.Node, target: Op, rule: Callable[[Op, Any, Any], Any]
) -> Callable[[Any, Any], Any]:
    """``rule`` on arguments in which tensors know whether they are complex."""

    def form(args: Any, kwargs: Any) -> Any:
        kinds = iter(_kinds((node.args, node.kwargs)))

        def marked(v: Any) -> Any:
            if isinstance(v, Tensor):
                return _Parts(v) if next(kinds) else _Real(v)
            if isinstance(v, list | tuple):
                return type(v)(map(marked, v))
            return v

        return rule(target, marked(args), {k: marked(v) for k, v in kwargs.items()})

    return form


def _kinds(value: Any) -> list[bool]:
    """Of every tensor operand in order whether it is complex."""
    if isinstance(value, fx.Node):
        return [_is_complex(value)]
    if isinstance(value, dict):
        value = [*value.values()]
    return [k for v in value for k in _kinds(v)] if isinstance(value, list | tuple) else []


def _part(value: Any, name: str, indexed: bool = False) -> Any:
    """Arguments with one part of each tensor; a condition is whole, and so are places."""
    if isinstance(value, _Real) and not value.real.is_floating_point():
        if indexed or value.real.dtype is torch.bool:
            return value.real
    if isinstance(value, _Parts | _Real):
        return getattr(value, name)
    if isinstance(value, complex):
        return value.real if name == "real" else value.imag
    if isinstance(value, torch.dtype) and value.is_complex:
        return value.to_real()
    if isinstance(value, list | tuple):
        return type(value)(_part(v, name, indexed) for v in value)
    return value


def _by_parts(target: Any, args: Any, kwargs: Any) -> Any:
    name = op_name(target)
    parts = []
    for part in ("real", "imag"):

        def chosen(v: Any, part: str = part) -> Any:
            real = isinstance(v, int | float) and not isinstance(v, bool)
            if real and part == "imag" and name in _SHIFTING:
                return 0
            return _part(v, part, name in _INDEXED)

        options = {k: v if k == "alpha" else chosen(v) for k, v in kwargs.items() if k != "layout"}
        parts.append(target(*map(chosen, args), **options))
    real, imag = parts
    if isinstance(real, list | tuple):
        return [torch.stack(both, -1) for both in zip(real, imag, strict=True)]
    return torch.stack([real, imag], -1)


def _product(target: Any, args: Any, kwargs: Any) -> Tensor:
    """(a + bi)(c + di); a real or a plain number is a factor of both parts."""
    flat = [*args[1]] if op_name(target) == "einsum" else [*args]
    place = [i for i, v in enumerate(flat) if isinstance(v, _Parts)]

    def of(*names: str) -> Tensor:
        chosen = dict(zip(place, names, strict=True))
        given = [
            getattr(v, chosen[i]) if i in chosen else (v.real if isinstance(v, _Real) else v)
            for i, v in enumerate(flat)
        ]
        whole = [args[0], given, *args[2:]] if op_name(target) == "einsum" else given
        return target(*whole, **kwargs)  # type: ignore[no-any-return]

    number = next((v for v in flat if isinstance(v, complex)), None)
    if not place and number is not None:
        (x,) = [v.real for v in flat if isinstance(v, _Real)]
        return torch.stack([x * number.real, x * number.imag], -1)
    if len(place) == 1:
        if number is not None:
            z = flat[place[0]]
            parts = [
                z.real * number.real - z.imag * number.imag,
                z.real * number.imag + z.imag * number.real,
            ]
            return torch.stack(parts, -1)
        return torch.stack([of("real"), of("imag")], -1)
    real = of("real", "real") - of("imag", "imag")
    return torch.stack([real, of("real", "imag") + of("imag", "real")], -1)


def _with_bias(target: Any, args: Any, kwargs: Any) -> Tensor:
    """x @ w.T + b, which torch takes all complex."""
    product = _product(target, args[:2], kwargs)
    if len(args) < 3 or args[2] is None:
        return product
    return product + torch.stack([args[2].real, args[2].imag], -1)


def _quotient(target: Any, args: Any, kwargs: Any) -> Tensor:
    """a / z is a times the conjugate of z, over its square."""
    a, z = args
    square = z.real * z.real + z.imag * z.imag
    if isinstance(a, _Parts):
        parts = [a.real * z.real + a.imag * z.imag, a.imag * z.real - a.real * z.imag]
    else:
        real = a.real if isinstance(a, _Real) else a
        parts = [real * z.real, -real * z.imag]
    return torch.stack([p / square for p in parts], -1)


def _absolute(pairs: Tensor) -> Tensor:
    """The root of the sum of squares, with a gradient of zero at zero."""
    square = pairs.square().sum(-1)
    zero = square == 0
    return square.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def _exponential(pairs: Tensor) -> Tensor:
    size, angle = pairs.select(-1, 0).exp(), pairs.select(-1, 1)
    return torch.stack([size * angle.cos(), size * angle.sin()], -1)


def _reciprocal(pairs: Tensor) -> Tensor:
    real, imag = pairs.unbind(-1)
    square = real * real + imag * imag
    return torch.stack([real / square, -imag / square], -1)


def _adjoint(pairs: Tensor) -> Tensor:
    real, imag = pairs.unbind(-1)
    return torch.stack([real.mT, -imag.mT], -1)


def _angle(pairs: Tensor) -> Tensor:
    return torch.atan2(pairs.select(-1, 1), pairs.select(-1, 0))


def _short_time(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    *_: Any,
) -> Tensor:
    """`torch.stft` of real samples [..., time], padded already: each frame times the window, in
    the middle of as many zeros as it is shorter, and transformed.

    Gives pairs [..., frequency, frame, 2].
    """
    frames = x.unfold(-1, n_fft, hop_length or n_fft // 4)
    length = win_length or n_fft
    if window is None and length < n_fft:
        window = torch.ones(length, dtype=x.dtype, device=x.device)
    if window is not None:
        before = (n_fft - length) // 2
        frames = frames * F.pad(window, [before, n_fft - length - before])
    transform = torch.fft.fft if onesided is False else torch.fft.rfft
    made = torch.view_as_real(transform(frames, norm="ortho" if normalized else "backward"))
    return made.transpose(-3, -2)


_SPECIAL: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": _absolute,
    "exp": _exponential,
    "angle": _angle,
    "reciprocal": _reciprocal,
    **dict.fromkeys(("mH", "adjoint", "matrix_H"), _adjoint),
}


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _pairs(fake: Tensor) -> Tensor:
    mode: Any = fake
    if not fake.is_complex():
        return fake
    with mode.fake_mode:
        return torch.empty((*fake.shape, 2), dtype=fake.dtype.to_real())
