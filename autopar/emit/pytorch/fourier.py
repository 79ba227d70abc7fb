"""Discrete Fourier transforms as Python; a complex number is a pair of real ones."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.emit.constants import literal
from autopar.emit.pytorch.site import Printer, Site
from autopar.emit.text import Expr, call

_HALF = {"bfloat16": "bfloat16", "float16": "half"}


def _transform(site: Site) -> Expr:
    """``torch.view_as_real(torch.fft.fftn(x, dim=(1, 2)))``"""
    x, attrs = site.args[0], site.attrs
    tensor = site.lowered.tensors[site.at.op.inputs[0]].tensor
    rank = len(tensor.shape) - bool(attrs["pairs"])
    several = attrs["transform"][-1] in "2n"
    half = _HALF.get(tensor.dtype)  # torch has no transform of these
    given = f"{x.atom}.float()" if half else x.text
    if attrs["pairs"]:
        atom = f"{x.atom}.float()" if half else x.atom
        given = f"torch.view_as_complex({atom}.contiguous())"
    arguments = [given]
    if attrs["sizes"] is not None:
        size = tuple(attrs["sizes"]) if several else attrs["sizes"][0]
        arguments.append(f"{'s' if several else 'n'}={literal(size)}")
    dims = tuple(attrs["dims"])
    if several or dims[0] != rank - 1:
        arguments.append(f"dim={literal(dims if several else dims[0])}")
    if attrs["norm"] is not None:
        arguments.append(f"norm={literal(attrs['norm'])}")
    text = call(f"torch.fft.{attrs['transform']}", arguments)
    if len(site.result(0)) > rank:
        conjugated = not attrs["pairs"] and attrs["transform"].startswith("i")
        text = call("torch.view_as_real", [f"{text}.resolve_conj()" if conjugated else text])
    return Expr(f"{text}.{half}()" if half else text, weight=2)


PRINTERS: Mapping[str, Printer] = {"torch::fft": _transform}
