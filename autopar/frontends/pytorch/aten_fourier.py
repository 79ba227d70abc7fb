"""Discrete Fourier transforms, their complex side as pairs of real numbers (see `aten_complex`).

One kind, ``torch::fft``: transform (a function of `torch.fft`), dims, sizes (of the result, or
None), norm, pairs (the operand is complex). A complex result is pairs too.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.frontends.pytorch.aten_call import Call, Lift
from autopar.frontends.pytorch.ir import Value
from autopar.frontends.pytorch.lifter import Lifter

TO_REAL = ("irfft", "hfft")
"""Of these the operand is complex and the result is not; a real one has no imaginary part."""
_FUNCTIONS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def _resized(lifter: Lifter, x: Value, sizes: dict[int, int]) -> Value:
    """``x`` cut off, or filled up with zeros, at the end of each dim."""
    for dim, size in sizes.items():
        if size == -1:
            continue
        x = lifter.slice(x, dim, 0, min(size, x.shape[dim]))
        if size == x.shape[dim]:
            continue
        shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
        more = [(0, size - n if d == dim else 0) for d, n in enumerate(x.shape)]
        x = lifter.emit("pad", [x], shape, x.dtype, low_high=more, value=0.0)
    return x


def _without_imaginary(lifter: Lifter, x: Value) -> Value:
    pair = [x, lifter.full(x.shape, 0.0, x.dtype)]
    return lifter.emit("stack", pair, (*x.shape, 2), x.dtype, dim=len(x.shape))


def _transform(function: str) -> Lift:
    def lift(call: Call) -> Value:
        x, given = call.x, call.node.args[0]
        assert isinstance(given, fx.Node)
        held: torch.Tensor = given.meta["val"]
        dims, sizes = call["dim"], call.get("s", call.get("n"))
        sizes = (sizes,) if isinstance(sizes, int) else sizes
        if dims is None:  # the last ones that sizes are given for, or all
            dims = range(held.dim() - len(sizes) if sizes is not None else 0, held.dim())
        dims = tuple(d % held.dim() for d in ((dims,) if isinstance(dims, int) else dims))
        pairs = held.is_complex()
        if not pairs and function.startswith(TO_REAL):
            x, pairs = (
                _without_imaginary(call.lifter, call.lifter.as_dtype(x, call.made.dtype)),
                True,
            )
        if sizes is not None and not function.startswith(TO_REAL):
            x, sizes = _resized(call.lifter, x, dict(zip(dims, sizes, strict=True))), None
        return call.result(
            "torch::fft", x, transform=function, dims=dims,
            sizes=None if sizes is None else tuple(sizes), norm=call["norm"],
            pairs=pairs,
        )  # fmt: skip

    return lift


_NORMS = (None, "ortho", "forward")  # as the ops below `torch.fft` number them


def _of_real(call: Call) -> Value:
    """``aten::_fft_r2c``, which PyTorch makes of transforms of real numbers."""
    dims = tuple(call["dim"])
    function = "rfft" if call["onesided"] else "fft"
    return call.result(
        "torch::fft", call.x, transform=function + "n" * (len(dims) > 1), dims=dims, sizes=None,
        norm=_NORMS[call["normalization"]], pairs=False,
    )  # fmt: skip


FOURIER: dict[str, Lift] = {
    "_fft_r2c": _of_real,
    **{
        f"fft_{name}{dims}": _transform(f"{name}{dims}")
        for name in _FUNCTIONS
        for dims in ("", "2", "n")
    },
}
OF_REAL: dict[str, Lift] = {
    name: lift for name, lift in FOURIER.items() if name.removeprefix("fft_").startswith(TO_REAL)
}
"""Transforms that may meet no complex number."""
