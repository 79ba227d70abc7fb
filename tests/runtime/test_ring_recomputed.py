"""A block that recomputes has the same gradients, and keeps a ring's result, not its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch import ring_results
from autopar.runtime.pytorch.recomputing import recompute
from autopar.runtime.pytorch.ring_attention import ring_attention
from tests.emit import simulated
from tests.runtime.ring_cases import CASES
from tests.runtime.ring_ranks import Case, cut, operands, shifts

PIECES = 4


def on_ranks(case: Case, options: dict[str, Any] | None) -> tuple[list[list[Tensor]], int]:
    """Gradients of each rank, and how often one shifts; ``options`` None: nothing recomputed."""
    given = operands(case)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(q, q, q)  # by the kernel that steps of rings use
        for _ in range(2):
            x = ring_attention(x, k, v, causal=case.causal, ring=case.axes, order=case.order)
        for i in range(2 * PIECES + 2):  # more than steps: each is known again by its number
            x = x + F.scaled_dot_product_attention(x, i * x, x)
        return x

    def task(here: Any) -> list[Tensor]:
        place = here.index(*case.axes)
        leaves = [cut(given[x], 2, case, place).clone().requires_grad_() for x in "qkv"]
        out = block(*leaves) if options is None else recompute(block, *leaves, **options)
        torch.autograd.backward(out, cut(given["grad"], 2, case, place))
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    with shifts():
        results, world = simulated.run(Mesh.parse(case.mesh), task)
    return results, len(world.log)


@pytest.mark.parametrize("name", ["zigzag", "causal", "one head"])
@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({}, 4),
        ({"keep_routes": True}, 4),
        ({"keep_collectives": True}, 3),
        ({"keep_products": True}, 3),
        ({"keep_products": True, "keep_routes": True}, 3),
    ],
)
def test_gradients_are_the_same_and_a_kept_ring_goes_around_once(
    name: str, options: dict[str, Any], times: int
) -> None:
    case = CASES[name]
    right, plain = on_ranks(case, None)
    got, issued = on_ranks(case, options)
    assert plain == 2 * 3 * (PIECES - 1)
    assert issued == 2 * times * (PIECES - 1)
    for each, expected in zip(got, right, strict=True):
        for x, y in zip(each, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_what_is_kept_is_the_result_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that the first forward leaves: one result and what normalizes it for each ring."""
    stores: list[Any] = []
    original = ring_results.kept

    def watched(store: Any, again: bool, mode: Any) -> Any:
        stores.append(store)
        return original(store, again, mode)

    monkeypatch.setattr(ring_results, "kept", watched)
    case = CASES["zigzag"]
    given = operands(case)

    def task(here: Any) -> None:
        q, k, v = (cut(given[x], 2, case, here.rank).clone().requires_grad_() for x in "qkv")

        def block(q: Tensor) -> Tensor:
            out: Tensor = ring_attention(q, k, v, causal=True, ring="cp", order="zigzag")
            return out

        recompute(block, q, keep_products=True)

    with shifts():
        simulated.run(Mesh.parse(case.mesh), task)
    left = [[tuple(x.shape) for x in each if x is not None] for store in stores for each in store]
    assert left == 2 * PIECES * [[(2, 4, 4, 8), (2, 4, 4)]]  # forward and again share a store
