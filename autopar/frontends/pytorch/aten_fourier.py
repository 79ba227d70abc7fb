"""Discrete Fourier transforms, their complex side as pairs of real numbers (see `aten_complex`).

One kind, ``torch::fft``: transform (a function of `torch.fft`), dims, sizes (of the result, or
None), norm, pairs (the operand is complex). A complex result is pairs too.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.frontends.pytorch import ir
from autopar.frontends.pytorch.aten_elementwise import Arguments, Lift
from autopar.frontends.pytorch.aten_shapes import slice_of
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter

_FUNCTIONS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def _resized(lifter: Lifter, x: Value, sizes: dict[int, int]) -> Value:
    """``x`` cut off, or filled up with zeros, at the end of each dim."""
    for dim, size in sizes.items():
        if size in (x.shape[dim], -1):
            continue
        if size < x.shape[dim]:
            x = slice_of(lifter, x, dim, 0, size)
            continue
        shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
        more = [(0, size - n if d == dim else 0) for d, n in enumerate(x.shape)]
        x = lifter.emit("pad", [x], shape, x.dtype, low_high=more, value=0.0)
    return x


def _transform(function: str) -> Lift:
    def lift(lifter: Lifter, node: fx.Node, a: Arguments) -> Value:
        x: Value = a["self"]
        given = node.args[0]
        assert isinstance(given, fx.Node)
        held: torch.Tensor = given.meta["val"]
        dims, sizes = a["dim"], a.get("s", a.get("n"))
        sizes = (sizes,) if isinstance(sizes, int) else sizes
        if dims is None:  # the last ones that sizes are given for, or all
            dims = range(held.dim() - len(sizes) if sizes is not None else 0, held.dim())
        dims = tuple(d % held.dim() for d in ((dims,) if isinstance(dims, int) else dims))
        if sizes is not None and function[:5] not in ("irfft", "hfft", "hfft2", "hfftn"):
            x, sizes = _resized(lifter, x, dict(zip(dims, sizes, strict=True))), None
        made = ir.like(node.meta["val"])
        return lifter.emit(
            "torch::fft", [x], made.shape, made.dtype,
            transform=function, dims=dims,
            sizes=None if sizes is None else tuple(sizes), norm=a["norm"],
            pairs=held.is_complex(),
        )  # fmt: skip

    return lift


FOURIER: dict[str, Lift] = {
    f"fft_{name}{dims}": _transform(f"{name}{dims}")
    for name in _FUNCTIONS
    for dims in ("", "2", "n")
}
