"""Tiny shapes with remainders on which every kernel is run beside plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
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

FORMS = (
    CrossEntropy(),
    CrossEntropy(label_smoothing=0.1),
    CrossEntropy(softcap=5.0, scale=0.5),
    CrossEntropy(ignore_index=0, label_smoothing=0.05, softcap=30.0),
)


@dataclass(frozen=True, slots=True)
class Case:
    """inputs: tensors with gradients, in the order of the first arguments; rest: the others."""

    kernel: str
    shape: str
    run: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Sequence[Tensor]
    rest: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Checked:
    """error: the largest of results and gradients, relative to the largest number of each.
    repeated: whether a second backward gave the same bits; untouched: whether no input was written.
    """

    error: float
    repeated: bool
    untouched: bool


def check(case: Case) -> Checked:
    """Runs it and the reference, forward once and backward twice."""
    before = [t.clone() for t in (*case.inputs, *case.rest) if isinstance(t, Tensor)]
    results, repeated = _run(case.run, case)
    wanted, _ = _run(case.reference, case)
    after = [t for t in (*case.inputs, *case.rest) if isinstance(t, Tensor)]
    untouched = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    errors = [relative(a, b) for a, b in zip(results, wanted, strict=True)]
    return Checked(max(errors), repeated, untouched)


def relative(result: Tensor, wanted: Tensor) -> float:
    """Of 8-bit floats: 0 where the bits are equal, else 1."""
    if result.shape != wanted.shape or result.dtype != wanted.dtype:
        return float("inf")
    if result.element_size() == 1:
        return 0.0 if torch.equal(result.view(torch.uint8), wanted.view(torch.uint8)) else 1.0
    off = (result.double() - wanted.double()).abs().max()
    return (off / wanted.double().abs().max().clamp(min=1e-30)).item()


def _run(function: Callable[..., Any], case: Case) -> tuple[list[Tensor], bool]:
    """(results and gradients, whether the second backward gave the same)."""
    leaves = [t.clone().requires_grad_() for t in case.inputs]
    outputs = function(*leaves, *case.rest)
    results = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if not results[0].requires_grad:
        return results, True
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in results]
    copies = [t.clone() for t in grads]
    first = torch.autograd.grad(results, leaves, grads, retain_graph=True)
    kept = [t.clone() for t in first]
    second = torch.autograd.grad(results, leaves, grads)
    same = all(torch.equal(a, b) for a, b in zip(kept, second, strict=True))
    same &= all(torch.equal(a, b) for a, b in zip(grads, copies, strict=True))
    return [*results, *kept], same


def _labels(drawn: random.Random, rows: int, columns: int, form: CrossEntropy) -> Tensor:
    labels = torch.randint(0, columns, (rows,))
    labels[drawn.randrange(rows)] = form.ignore_index
    return labels


def _chunk_loss(drawn: random.Random, n: int) -> Case:
    rows, columns = drawn.randint(2, 5), drawn.choice((19, 37, 64, 129, 1009, 4999))
    form = FORMS[n % len(FORMS)]
    rest = (_labels(drawn, rows, columns, form), form)
    shape = f"{rows} x {columns} {_words(form)}"
    logits = [torch.randn(rows, columns)]
    return Case("chunk_loss", shape, chunk_loss.chunk_loss, chunk_loss.reference, logits, rest)


def _tile_loss(drawn: random.Random, n: int) -> Case:
    rows, width = drawn.randint(2, 37), drawn.randint(5, 70)
    columns = drawn.choice((5, 37, 64, 130, 150, 600))
    form = FORMS[n % len(FORMS)]
    rest = (_labels(drawn, rows, columns, form), form)
    shape = f"{rows} x {width} x {columns} {_words(form)}"
    inputs = [torch.randn(rows, width), torch.randn(columns, width) / width**0.5]
    return Case("tile_loss", shape, tile_loss.tile_loss, tile_loss.reference, inputs, rest)


def _words(form: CrossEntropy) -> str:
    words = (f"smoothing {form.label_smoothing:g}" if form.label_smoothing else "",)
    return " ".join((*words, f"cap {form.softcap:g}" if form.softcap else "")).strip()


def _gated_activation(drawn: random.Random, n: int) -> Case:
    rows, columns = drawn.randint(1, 4), drawn.choice((1, 19, 64, 257, 2051))
    activation = ("silu", "gelu_tanh")[n % 2]
    halves = torch.randn(rows, 2, 2 * columns).chunk(2, -1)
    run, reference = gated_activation.gated_activation, gated_activation.reference
    shape = f"{rows} x 2 x {columns} {activation}"
    return Case("gated_activation", shape, run, reference, halves, (activation,))


def _rotary(drawn: random.Random, n: int) -> Case:
    samples, positions, heads = (drawn.randint(1, 4) for _ in range(3))
    half = drawn.choice((1, 3, 8, 17))
    width = 2 * half + drawn.choice((0, 0, 5))
    interleaved, position_dim = bool(n % 2), 1 + n // 2 % 2
    sizes = (positions, heads) if position_dim == 1 else (heads, positions)
    angles = torch.randn(*((samples,) if n % 3 else ()), positions, half)
    x = torch.randn(samples, *sizes, width)
    shape = f"{list(x.shape)} turned {2 * half}{' interleaved' if interleaved else ''}"
    rest = (angles.cos(), angles.sin(), interleaved, position_dim)
    return Case("rotary", shape, rotary.rotary, rotary.reference, [x], rest)


def _fp8_cast(drawn: random.Random, n: int) -> Case:
    rows, columns = drawn.choice((1, 3, 37, 130)), drawn.choice((5, 128, 200, 300, 4500))
    scaling = ("tensor", "row", "1x128", "128x128")[n % 4]
    dtype = (torch.float8_e4m3fn, torch.float8_e5m2)[n // 4 % 2]
    x = torch.randn(rows, columns) * torch.logspace(-5, 2, columns)
    x[drawn.randrange(rows)] = 0
    shape = f"{rows} x {columns} {str(dtype)[13:]} {scaling}"
    scale = torch.tensor(0.01) if scaling == "tensor" and n % 8 == 4 else None
    rest = (dtype, scaling, scale)
    return Case("fp8_cast", shape, fp8_cast.fp8_cast, fp8_cast.reference, [x], rest)


def _norm_inputs(drawn: random.Random) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = drawn.choice((5, 19, 64, 129, 1000))  # of 1, the gradient is rounding alone
    # 261 rows and more: a program of the backward then has several.
    shape = (drawn.randint(1, 3), drawn.choice((1, 4, 87)) if width < 100 else 2, width)
    return torch.randn(shape), torch.randn(shape), torch.randn(width), torch.randn(width)


def _rms_norm(drawn: random.Random, n: int) -> Case:
    x, residual, weight, _ = _norm_inputs(drawn)
    inputs = [x, weight, residual] if n % 2 else [x, weight]
    rest = (1e-5, float(n // 2 % 2)) if n % 2 else (None, 1e-5, float(n // 2 % 2))
    shape = f"{list(x.shape)}{' + residual' if n % 2 else ''}"
    return Case("rms_norm", shape, norm.rms_norm, norm.rms_norm_reference, inputs, rest)


def _layer_norm(drawn: random.Random, n: int) -> Case:
    x, residual, weight, bias = _norm_inputs(drawn)
    inputs = [x, weight, bias, residual] if n % 2 else [x, weight, bias]
    shape = f"{list(x.shape)}{' + residual' if n % 2 else ''}"
    return Case("layer_norm", shape, norm.layer_norm, norm.layer_norm_reference, inputs)


DRAWN: Mapping[str, Callable[[random.Random, int], Case]] = {
    "chunk_loss": _chunk_loss,
    "tile_loss": _tile_loss,
    "gated_activation": _gated_activation,
    "rotary": _rotary,
    "fp8_cast": _fp8_cast,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
}


def cases(kernel: str, count: int, seed: int = 0) -> list[Case]:
    """Of one kernel, the same for the same seed."""
    drawn = random.Random(f"{kernel} {seed}")
    torch.manual_seed(drawn.randrange(1 << 30))
    return [DRAWN[kernel](drawn, n) for n in range(count)]
