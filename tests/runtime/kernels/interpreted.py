"""Checks of interpreted kernels, run by `test_interpreted.py` in one process of its own, which has
TRITON_INTERPRET=1; prints {name: what is wrong, or nothing}."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.runtime.pytorch import loss_head
from autopar.runtime.pytorch.kernels import (
    chunk_loss,
    cross_entropy,
    fp8_cast,
    gated_activation,
    norm,
    tile_loss,
)
from autopar.runtime.pytorch.kernels.cross_entropy import CrossEntropy, Statistics
from autopar.runtime.pytorch.kernels.launch import KernelUnavailable
from autopar.runtime.pytorch.kernels.table import KERNELS, kernel
from autopar.runtime.pytorch.loss_head_kernel import losses_by_kernel
from benchmarks import kernel_timing
from benchmarks.kernel_cases import Case, cases, check, relative
from benchmarks.kernel_shapes import Shape
from tests.sampling import some

COUNT = 8
FORM = CrossEntropy(label_smoothing=0.1, softcap=5.0, scale=0.7)


def near(result: torch.Tensor, wanted: torch.Tensor, limit: float = 1e-6) -> None:
    error = relative(result, wanted)
    assert error <= limit, f"off by {error}"


def _as_the_reference(name: str) -> Callable[[], None]:
    def of_kernel() -> None:
        for case in cases(name, COUNT, seed=7):
            checked = check(case)
            assert checked.error <= kernel(name).tolerance, f"{case.shape}: off by {checked.error}"
            assert checked.repeated, f"{case.shape}: another second backward"
            assert checked.untouched, f"{case.shape}: an input was written"

    return of_kernel


def gradient_in_place_of_logits() -> None:
    logits, labels = torch.randn(3, 37), torch.tensor([1, -100, 36])
    weights, kept = torch.rand(3), logits.clone()
    loss, apart = chunk_loss.loss_and_gradient(logits, labels, FORM, weights)
    assert torch.equal(logits, kept), "logits were written without being asked"
    again, same = chunk_loss.loss_and_gradient(logits, labels, FORM, weights, out=logits)
    assert same is logits
    assert torch.equal(again, loss)
    assert torch.equal(logits, apart)
    leaf = kept.requires_grad_()
    wanted = chunk_loss.reference(leaf, labels, FORM)
    near(loss, wanted.detach())
    near(apart, torch.autograd.grad(wanted, leaf, weights)[0])


def split_vocabulary() -> None:
    """Two ranks' columns, put together as collectives would."""
    x, weight, labels = torch.randn(5, 19), torch.randn(50, 19), torch.randint(0, 50, (5,))
    labels[3] = -100
    logits, cut = x @ weight.T, 23
    pieces = ((0, slice(0, cut)), (cut, slice(cut, 50)))
    wanted = cross_entropy.reference(logits, labels, FORM)
    whole = chunk_loss.loss_and_gradient(logits, labels, FORM)[1]
    for of in ("logits", "tiles"):
        parts = [
            chunk_loss.statistics(logits[:, columns], labels, first, FORM)
            if of == "logits"
            else tile_loss.statistics(x, weight[columns], labels, first, FORM)
            for first, columns in pieces
        ]
        together = cross_entropy.merged(Statistics(*map(torch.stack, zip(*parts, strict=True))))
        loss, total = cross_entropy.losses(together, labels, 50, FORM)
        near(loss, wanted)
        for first, columns in pieces:
            one = chunk_loss.gradient(logits[:, columns], labels, first, total, FORM, vocabulary=50)
            near(one, whole[:, columns])
            _, of_weight = tile_loss.gradients(
                x, weight[columns], labels, first, total, FORM, vocabulary=50
            )
            assert of_weight is not None
            near(of_weight, whole[:, columns].T @ x)


def heads_of_losses() -> None:
    """As the loss head calls kernels, whole and in two pieces of the vocabulary, beside its own way
    with torch's ops."""
    for form in (FORM, CrossEntropy(), CrossEntropy(scale=0.5), CrossEntropy(softcap=3.0)):
        logits, labels = torch.randn(5, 50), torch.randint(0, 50, (5,))
        labels[3] = -100
        keep = (labels != -100).unsqueeze(1)
        head = loss_head.Head(
            1, 50, (), 0, -100, form.label_smoothing, form.scale, form.softcap or None
        )
        wanted = logits.clone()
        losses = loss_head._losses(wanted, labels, head, True).masked_fill(labels == -100, 0)
        made = logits.clone()
        own = losses_by_kernel(made, labels, form, 0, 50, True)
        near(own.masked_fill(labels == -100, 0), losses)
        near(made * keep, wanted * keep)
        cut = 23
        pieces = [(0, logits[:, :cut].clone()), (cut, logits[:, cut:].clone())]
        tops = [chunk_loss.statistics(piece, labels, first, form).top for first, piece in pieces]
        shares: list[torch.Tensor] = []

        def over(x: torch.Tensor, op: str, tops: Any = tops, shares: Any = shares) -> torch.Tensor:
            if op == "max":
                return torch.stack(tops).amax(0)
            shares.append(x)
            return torch.stack(shares[:2]).sum(0)

        for first, piece in pieces:  # what each gives to the sum
            losses_by_kernel(piece, labels, form, first, 50, False, over)
        for first, piece in pieces:
            own = losses_by_kernel(piece, labels, form, first, 50, True, over)
            near(own.masked_fill(labels == -100, 0), losses)
            near(piece * keep, wanted[:, first : first + piece.shape[1]] * keep)


def columns_of_minus_infinity() -> None:
    logits, labels = torch.randn(2, 70), torch.tensor([3, 69])
    logits[:, 5:64] = -torch.inf
    loss, gradient = chunk_loss.loss_and_gradient(logits, labels)
    near(loss, chunk_loss.reference(logits, labels))
    assert gradient.isfinite().all()
    piece = chunk_loss.statistics(logits[:, 5:64].contiguous(), labels)
    assert torch.equal(piece.total, torch.zeros(2)), "a piece without any column counts nothing"


def every_number_in_eight_bits() -> None:
    """Each bfloat16 there is: subnormal ones, infinite ones, and those that are none."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).reshape(64, 1024)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for scale in (torch.tensor(1.0), torch.tensor(3e-3)):
            q, _ = fp8_cast.fp8_cast(x, dtype, "tensor", scale)
            wanted, _ = fp8_cast.reference(x, dtype, "tensor", scale)
            none = x.isnan()
            assert torch.equal(q.float().isnan(), none), "what is no number stays none"
            near(q[~none], wanted[~none], 0.0)


def norms_of_wide_rows() -> None:
    """With the weight's gradient by a kernel of its own."""
    widest, norm.WIDTH_IN_REGISTERS = norm.WIDTH_IN_REGISTERS, 4
    try:
        for name in ("rms_norm", "layer_norm"):
            for case in cases(name, 2, seed=3):
                checked = check(case)
                assert checked.error <= 1e-6, f"{case.shape}: {checked.error}"
                assert checked.repeated
    finally:
        norm.WIDTH_IN_REGISTERS = widest


def lower_precision() -> None:
    """bfloat16 in and out. The interpreter cuts digits off where a device rounds to nearest: up to
    2^-8 a time, and a sum with a residual is rounded once more."""
    for name in ("chunk_loss", "gated_activation", "rotary", "rms_norm", "layer_norm"):
        case = cases(name, 2, seed=5)[1]
        low = [t.bfloat16() for t in case.inputs]
        rest = [t.bfloat16() if _is_float(t) else t for t in case.rest]
        outputs = case.run(*low, *rest)
        wide = [t.float() if _is_float(t) else t for t in (*low, *rest)]
        wanted = case.reference(*wide)
        results = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        expected = [wanted] if isinstance(wanted, torch.Tensor) else wanted
        for one, other in zip(results, expected, strict=True):
            near(one.float(), other, 2**-7)


def tiles_of_half_precision() -> None:
    """In float16: the gradient of a tile is rounded to it before it is multiplied."""
    x, weight, labels = (
        torch.randn(150, 70),
        torch.randn(300, 70) / 8,
        torch.randint(0, 300, (150,)),
    )
    low = [t.half().requires_grad_() for t in (x, weight)]
    wide = [t.detach().float().requires_grad_() for t in low]
    loss = tile_loss.tile_loss(low[0], low[1], labels)
    wanted = tile_loss.reference(wide[0], wide[1], labels)
    near(loss, wanted)
    grad = torch.rand(150)
    pairs = zip(
        torch.autograd.grad(loss, low, grad),
        torch.autograd.grad(wanted, wide, grad),
        strict=True,
    )
    for one, other in pairs:
        near(one.float(), other, 2**-10)
    with pytest.raises(KernelUnavailable, match="bits of bfloat16"):
        tile_loss.tile_loss(x.bfloat16(), weight.bfloat16(), labels)


def timing_on_a_device() -> None:
    """What a device would run, with the clock of this machine: figures of each way, errors beside
    float32, and a call that fails as a row of its own."""

    def inputs(device: torch.device) -> tuple[list[torch.Tensor], list[object]]:
        halves = torch.randn(3, 40, device=device, dtype=torch.bfloat16).chunk(2, -1)
        return list(halves), ["silu"]

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("out of something")

    own, plain = gated_activation.gated_activation, gated_activation.reference
    cpu = torch.device("cpu")
    rows: list[dict[str, Any]] = []
    for called in (own, fails):
        shape = Shape("gated_activation", "3 x 20", called, plain, inputs)
        row: dict[str, Any] = {"kernel": shape.kernel, "shape": shape.name, "failed": {}}
        kernel_timing.compare(shape, cpu, row)
        for way in ("ours", "eager", "liger"):
            kernel_timing.time_way(shape, way, cpu, lambda call: len([call()]), row)
        rows.append(row)
    good, bad = rows
    assert not good["failed"], good
    assert good["repeated"]
    assert good["error"] < 2**-6
    assert {"ours_forward_ms", "ours_both_ms", "eager_both_ms"} <= good.keys()
    assert "liger_forward_ms" not in good
    assert bad["failed"].keys() == {"compared", "ours"}
    assert kernel_timing.means(rows)["gated_activation"] == {
        "eager forward / ours": 1.0,
        "eager both / ours": 1.0,
    }
    assert [t["value"] for t in kernel_timing.targets(rows)] == [2, 1, 0, 0]


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def gradient_of_one_input_alone() -> None:
    """A backward in two: of the inputs now, of the weight later, from one graph."""
    case: Case = cases("tile_loss", 1)[0]
    x, weight = (t.clone().requires_grad_() for t in case.inputs)
    loss = case.run(x, weight, *case.rest).sum()
    (of_x,) = torch.autograd.grad(loss, x, retain_graph=True)
    (of_weight,) = torch.autograd.grad(loss, weight, retain_graph=True)
    both = torch.autograd.grad(loss, (x, weight))
    assert torch.equal(of_x, both[0])
    assert torch.equal(of_weight, both[1])


CHECKS: dict[str, Callable[[], None]] = {
    **{f"{row.name} as its reference": _as_the_reference(row.name) for row in KERNELS},
    **{
        check.__name__.replace("_", " "): check
        for check in (
            gradient_in_place_of_logits,
            split_vocabulary,
            heads_of_losses,
            columns_of_minus_infinity,
            every_number_in_eight_bits,
            norms_of_wide_rows,
            lower_precision,
            tiles_of_half_precision,
            timing_on_a_device,
            gradient_of_one_input_alone,
        )
    },
}
TRIED = some(CHECKS, 8)


def main() -> None:
    wrong = {}
    for name in TRIED:
        torch.manual_seed(0)
        try:
            CHECKS[name]()
            wrong[name] = ""
        except Exception:
            wrong[name] = traceback.format_exc()
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()
