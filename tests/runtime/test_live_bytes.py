"""What a rehearsed step holds: memory counts while something holds it, at the size it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.rehearsal import kernels, live
from autopar.runtime.rehearsal.live import Live
from autopar.torch_private.modes import FakeTensorMode

MB = 1 << 20


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (live, kernels):
        monkeypatch.setattr(module, "NAME", "cpu")


def held_by(step: Callable[[], object]) -> Live:
    counted = Live()
    with FakeTensorMode(), counted.counted():
        step()
    return counted


def test_views_are_none_and_what_is_dropped_goes() -> None:
    def step() -> None:
        x = torch.empty(MB)
        kept = [x.view(2, -1), x[:5]]
        x = torch.empty(2 * MB)  # the first lives on in its views
        assert now() == 12 * MB
        del kept
        assert now() == 8 * MB

    counted = Live()

    def now() -> int:
        return counted.now

    with FakeTensorMode(), counted.counted():
        step()
    assert (counted.now, counted.peak) == (0, 12 * MB)


def test_memory_may_be_given_back_and_taken_again() -> None:
    """As FSDP2 does with parameters that are whole for a while."""
    counted = Live()
    with FakeTensorMode(), counted.counted():
        whole = torch.empty(MB)
        whole.untyped_storage().resize_(0)
        assert counted.now == 0
        whole.untyped_storage().resize_(4 * MB)
        assert counted.now == 4 * MB
        del whole
    assert (counted.now, counted.peak) == (0, 4 * MB)
    assert torch.empty(3).untyped_storage().resize_(0).nbytes() == 0  # as ever outside


def saved(step: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> int:
    """Bytes that a step leaves for its backward, with its result."""
    counted = Live()
    with FakeTensorMode(), counted.counted():
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        before = counted.now
        result = step(x)
        left = counted.now - before
        torch.autograd.backward(result.sum())
    return left


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        # the result and a number a row in float32, no scores
        (lambda x: F.scaled_dot_product_attention(x, x, x), 2 * 2 * 512 * 64 + 4 * 2 * 512),
        (lambda x: F.rms_norm(x, (64,)), 2 * 2 * 512 * 64 + 4 * 2 * 512),
        # the result and a byte an element
        (lambda x: F.dropout(x, 0.1), 3 * 2 * 512 * 64),
    ],
)
def test_kernels_of_gpus_keep_what_they_keep_there(
    step: Callable[[Tensor], Tensor], expected: int
) -> None:
    with kernels.in_place() as as_captured:
        assert saved(step, (1, 2, 512, 64)) == expected
        with as_captured():
            assert saved(step, (1, 2, 512, 64)) >= expected  # a CPU has one for attention


def test_scores_are_made_where_they_are_asked_for() -> None:
    def step(x: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(x, x, x)

    with kernels.in_place():
        assert saved(step, (1, 2, 512, 64)) > 2 * 2 * 512 * 512
