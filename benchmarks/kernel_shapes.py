"""Shapes of published models at which kernels are compiled and timed, on any device: on the meta
device nothing is computed, and `launch.recorded` gives what would be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.pytorch.kernels import (
    chunk_loss,
    fp8_cast,
    gated_activation,
    norm,
    rotary,
    tile_loss,
)
from autopar.runtime.pytorch.kernels.cross_entropy import CrossEntropy

Inputs = tuple[list[Tensor], list[Any]]


@dataclass(frozen=True, slots=True)
class Shape:
    """inputs: (tensors with gradients, the other arguments) on a device; liger: what Liger has for
    it, asked when it is importable."""

    kernel: str
    name: str
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    inputs: Callable[[torch.device], Inputs]
    differentiable: bool = True
    liger: Callable[[], Callable[..., Any]] | None = None


def _randn(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _losses() -> Iterator[Shape]:
    capped = CrossEntropy(softcap=30.0)
    for rows, vocabulary, form in (
        (2048, 32000, CrossEntropy()),
        (8192, 32000, CrossEntropy(label_smoothing=0.1)),
        (4096, 128256, CrossEntropy()),
        (8192, 128256, CrossEntropy()),
        (4096, 151936, CrossEntropy()),
        (2048, 256000, capped),
    ):

        def logits(
            device: torch.device, r: int = rows, v: int = vocabulary, f: Any = form
        ) -> Inputs:
            return [_randn(device, r, v)], [torch.randint(0, v, (r,), device=device), f]

        name = f"{rows} x {vocabulary}"
        yield Shape(
            "chunk_loss", name, chunk_loss.chunk_loss, chunk_loss.reference, logits,
            liger=_liger_loss,
        )  # fmt: skip
    for rows, width, vocabulary, form in (
        (4096, 2048, 32000, CrossEntropy()),
        (8192, 2048, 32000, CrossEntropy(label_smoothing=0.1)),
        (4096, 4096, 128256, CrossEntropy()),
        (8192, 4096, 128256, CrossEntropy()),
        (4096, 3584, 151936, CrossEntropy()),
        (2048, 2304, 256000, capped),
    ):

        def head(
            device: torch.device, r: int = rows, w: int = width, v: int = vocabulary, f: Any = form
        ) -> Inputs:
            weight = _randn(device, v, w) / w**0.5
            labels = torch.randint(0, v, (r,), device=device)
            return [_randn(device, r, w), weight], [labels, f]

        name = f"{rows} x {width} x {vocabulary}"
        yield Shape(
            "tile_loss", name, tile_loss.tile_loss, tile_loss.reference, head,
            liger=_liger_linear_loss,
        )  # fmt: skip


def _gates() -> Iterator[Shape]:
    for rows, width, activation in (
        (4096, 5632, "silu"),
        (8192, 8192, "silu"),
        (8192, 14336, "silu"),
        (4096, 28672, "silu"),
        (8192, 18944, "silu"),
        (8192, 9216, "gelu_tanh"),
    ):

        def gates(
            device: torch.device, r: int = rows, w: int = width, a: str = activation
        ) -> Inputs:
            return [_randn(device, r, w), _randn(device, r, w)], [a]

        name = f"{rows} x {width} {activation}"
        kernel, plain = gated_activation.gated_activation, gated_activation.reference
        yield Shape("gated_activation", name, kernel, plain, gates, liger=_liger_gate)


def _rotations() -> Iterator[Shape]:
    for samples, positions, heads, width, interleaved in (
        (1, 4096, 32, 128, False),
        (2, 4096, 32, 128, False),
        (4, 4096, 8, 128, False),
        (1, 8192, 64, 128, False),
        (1, 16384, 32, 128, False),
        (4, 4096, 16, 64, True),
    ):
        sizes = (samples, positions, heads, width)

        def heads_of(
            device: torch.device, s: tuple[int, ...] = sizes, i: bool = interleaved
        ) -> Inputs:
            angles = _randn(device, s[1], s[3] // 2)
            return [_randn(device, *s)], [angles.cos(), angles.sin(), i]

        name = " x ".join(map(str, sizes)) + (" interleaved" if interleaved else "")
        yield Shape("rotary", name, rotary.rotary, rotary.reference, heads_of)


def _casts() -> Iterator[Shape]:
    low, wide = torch.float8_e4m3fn, torch.float8_e5m2
    for rows, width, dtype, scaling in (
        (4096, 4096, low, "tensor"),
        (8192, 14336, low, "row"),
        (8192, 14336, low, "1x128"),
        (14336, 4096, low, "128x128"),
        (8192, 4096, low, "1x128"),
        (8192, 4096, wide, "tensor"),
    ):

        def matrix(
            device: torch.device, r: int = rows, w: int = width, d: Any = dtype, s: str = scaling
        ) -> Inputs:
            return [], [_randn(device, r, w), d, s]

        name = f"{rows} x {width} {str(dtype)[13:]} {scaling}"
        yield Shape("fp8_cast", name, fp8_cast.fp8_cast, fp8_cast.reference, matrix, False)


def _norms() -> Iterator[Shape]:
    for rows, width, residual in (
        (8192, 2048, False),
        (8192, 4096, False),
        (16384, 4096, False),
        (8192, 8192, False),
        (4096, 16384, False),
        (8192, 4096, True),
    ):

        def rms(device: torch.device, r: int = rows, w: int = width, b: bool = residual) -> Inputs:
            beside = [_randn(device, r, w)] if b else []
            return [_randn(device, r, w), _randn(device, w), *beside], []

        name = f"{rows} x {width}{' + residual' if residual else ''}"
        liger = None if residual else _liger_rms
        yield Shape(
            "rms_norm", name, norm.rms_norm, norm.rms_norm_reference, rms, liger=liger
        )  # fmt: skip
    for rows, width, residual in (
        (8192, 768, False),
        (8192, 1024, False),
        (8192, 2048, False),
        (8192, 4096, False),
        (4096, 8192, False),
        (8192, 5120, True),
    ):

        def layer(
            device: torch.device, r: int = rows, w: int = width, b: bool = residual
        ) -> Inputs:
            beside = [_randn(device, r, w)] if b else []
            return [_randn(device, r, w), _randn(device, w), _randn(device, w), *beside], []

        name = f"{rows} x {width}{' + residual' if residual else ''}"
        yield Shape(
            "layer_norm", name, norm.layer_norm, norm.layer_norm_reference, layer,
            liger=None if residual else _liger_layer,
        )  # fmt: skip


def shapes() -> list[Shape]:
    return [
        *_losses(), *_gates(), *_rotations(), *_casts(), *_norms(),
    ]  # fmt: skip


def _functional(name: str) -> Callable[..., Any]:
    from liger_kernel.transformers import functional

    function: Callable[..., Any] = getattr(functional, name)
    return function


def _options(form: CrossEntropy) -> Mapping[str, Any]:
    return {"label_smoothing": form.label_smoothing, "softcap": form.softcap or None}


def _liger_loss() -> Callable[..., Any]:
    function = _functional("liger_cross_entropy")
    return lambda logits, labels, form: function(logits, labels, **_options(form))


def _liger_linear_loss() -> Callable[..., Any]:
    function = _functional("liger_fused_linear_cross_entropy")
    return lambda x, weight, labels, form: function(x, weight, labels, **_options(form))


def _liger_gate() -> Callable[..., Any]:
    silu, gelu = _functional("liger_swiglu"), _functional("liger_geglu")
    return lambda gate, up, activation: (silu if activation == "silu" else gelu)(gate, up)


def _liger_rms() -> Callable[..., Any]:
    function = _functional("liger_rms_norm")
    return lambda x, weight: function(x, weight, 1e-6)


def _liger_layer() -> Callable[..., Any]:
    function = _functional("liger_layer_norm")
    return lambda x, weight, bias: function(x, weight, bias, 1e-5)


def arguments(shape: Shape, device: torch.device) -> tuple[Sequence[Tensor], list[Any]]:
    """(leaves, all arguments in order)."""
    inputs, rest = shape.inputs(device)
    leaves = [t.detach().requires_grad_() for t in inputs]
    return leaves, [*leaves, *rest]
