"""Ring attention is attention of whole tensors, forward and backward, and moves what it states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from autopar.nouns.mesh import Mesh
from autopar.runtime.pytorch import document_blocks, ring_kernels, transport
from autopar.runtime.pytorch import ranks as rank_state
from autopar.runtime.pytorch import ring_attention as ring
from autopar.runtime.pytorch.counting import Counting
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.ring_attention import ring_attention
from autopar.runtime.pytorch.ring_blocks import Block, rounds, shifts
from autopar.torch_private.distributed import fake_store
from tests.runtime.ring_cases import CASES, MESHES
from tests.runtime.ring_ranks import Case, around, farthest, operands, whole
from tests.runtime.test_pieces import Alone

LIMIT = 1e-9


@pytest.fixture(scope="module", autouse=True)
def small_tiles() -> Iterator[None]:
    """So that documents of a few tokens have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_blocks, "TILE", 3)
        yield


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", list(CASES))
def test_agrees_with_whole_tensors(name: str, mesh: str) -> None:
    case = replace(CASES[name], mesh=mesh, s=24)
    given = operands(case)
    expected = whole(case, given)
    for what, distance in farthest(around(case, given)[0], expected).items():
        assert distance < LIMIT, what


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh = draw(st.sampled_from([*MESHES, "a=2 x b=3", "a=2 x b=1 x c=2"]))
    n = Mesh.parse(mesh).device_count
    order = draw(st.sampled_from(["contiguous", "zigzag"]))
    causal = draw(st.booleans())
    s = n * draw(st.integers(1, 4)) * (2 if order == "zigzag" else 1)
    g = draw(st.integers(1, 3))
    few = st.integers(1, 5)
    packed = draw(st.booleans())
    ends = sorted(draw(st.sets(st.integers(1, s), max_size=4)) | {0, s}) if packed else []
    return Case(
        mesh=mesh,
        s=s,
        t=0 if causal or packed else n * draw(st.integers(1, 4)) * (2 if order == "zigzag" else 1),
        h=g * draw(st.integers(1, 3)),
        g=g,
        d=draw(few),
        e=draw(few),
        b=draw(st.integers(1, 2)),
        causal=causal,
        order=order,
        window=draw(st.none() | st.integers(1, s + 2)) if causal else None,
        mask=""
        if packed
        else draw(st.sampled_from(["", "", "two dims", "keys", "added", "trained"])),
        documents=tuple(b - a for a, b in pairwise(ends)),
        sinks=packed and draw(st.booleans()),
        scale=draw(st.none() | st.floats(0.05, 2)),
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_agrees_whatever_the_sizes(case: Case) -> None:
    given = operands(case)
    expected = whole(case, given)
    for what, distance in farthest(around(case, given)[0], expected).items():
        assert distance < LIMIT, what


def test_rows_in_portions_are_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_kernels, "SCORES", 100)
    for name in (
        "trained, zigzag",
        "trained, of keys",
        "narrow values",
        "dead rows, narrow values",
    ):
        given = operands(CASES[name])
        expected = whole(CASES[name], given)
        assert max(farthest(around(CASES[name], given)[0], expected).values()) < LIMIT


@pytest.mark.parametrize("name", ["plain", "zigzag", "window in a piece", "pairs", "added"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_as_one_kernel(name: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], s=128, d=16, e=16)
    low = operands(case, dtype)
    exact = {k: x if x.dtype is torch.bool else x.double() for k, x in low.items()}
    expected = whole(case, exact)
    got = around(case, low)[0]
    one = farthest(whole(case, low, SDPBackend.FLASH_ATTENTION), expected)
    assert all(x.dtype is dtype for x in got.items().values())
    for what, distance in farthest(got, expected).items():
        assert distance < 1.5 * one[what], what


def test_the_same_bits_each_time() -> None:
    case = Case(causal=True, order="zigzag", s=32)
    given = operands(case, torch.bfloat16)
    first, second = (around(case, given)[0].items() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_what_is_asked_gets_a_gradient() -> None:
    here = Alone(Mesh.parse("1"))
    q, k, v = (torch.randn(1, 2, 4, 4, dtype=torch.float64) for _ in range(3))
    with rank_state.using(here):
        for leaf in (q, k, v):
            for x in (q, k, v):
                x.requires_grad_(x is leaf)
            out = ring_attention(q, k, v, causal=True, ring="cp")
            (grad,) = torch.autograd.grad(out.sum(), leaf)
            right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.testing.assert_close(grad, torch.autograd.grad(right.sum(), leaf)[0])


def stated(case: Case, itemsize: int, pair: bool = True) -> dict[str, int]:
    """Bytes by axis that `ring_blocks` says."""
    mesh = Mesh.parse(case.mesh)
    n = case.ways
    each = case.b * case.g * (case.t or case.s) // n * (case.d + case.e)
    around_ = rounds(mesh.sizes, case.s // n, case.order, case.causal, case.window)  # type: ignore[arg-type]
    return {
        axis: count * each * (2 * itemsize + (max(itemsize, 4) if pair else 0))
        for axis, count in zip(mesh.axes, shifts(around_), strict=True)
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mesh", MESHES[1:])
@pytest.mark.parametrize(
    "name",
    ["plain", "zigzag", "narrow values", "more keys", "window in a piece", "window of two pieces"],
)
def test_simulated_ranks_issue_the_stated_bytes(name: str, mesh: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], mesh=mesh, s=24)
    issued: dict[str, int] = dict.fromkeys(case.axes, 0)
    for kind, axis, size in around(case, operands(case, dtype))[1].log:
        assert kind == "shift"
        issued[axis] += size
    assert issued == stated(case, dtype.itemsize)


def on_a_fake_group(mesh: dict[str, int], task: Callable[[Ranks], Any]) -> Any:
    """``task`` on rank 1 of a mesh whose collectives move nothing."""
    dist.init_process_group("fake", store=fake_store(), rank=1, world_size=math.prod(mesh.values()))
    try:
        here = Ranks(mesh)
        with rank_state.using(here):
            return task(here)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wanted", ["all", "queries alone", "nothing"])
def test_counted_bytes_are_the_stated_ones(wanted: str) -> None:
    case = Case(mesh="outer=2 x inner=4", s=32, causal=True, order="zigzag")

    def task(here: Ranks) -> dict[str, int]:
        q, k, v = (torch.randn(case.b, h, case.s // 8, case.d) for h in (case.h, case.g, case.g))
        q.requires_grad_(wanted != "nothing")
        k.requires_grad_(wanted == "all")
        with Counting(here) as counted:
            out = ring_attention(q, k, v, causal=True, ring=case.axes, order="zigzag")
            if wanted != "nothing":
                torch.autograd.backward(out.sum())
        rows = counted.rows()
        assert {row.kind for row in rows} == {"shift"}
        return {a: sum(r.size_bytes * r.count for r in rows if r.axis == a) for a in case.axes}

    issued = on_a_fake_group({"outer": 2, "inner": 4}, task)
    right = stated(case, 4, pair=wanted == "all")
    assert issued == {a: size // (2 if wanted == "nothing" else 1) for a, size in right.items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_compute_the_same_in_zigzag_order_and_nothing_that_is_hidden(
    mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By products that kernels are asked for, forward and backward."""
    case = Case(mesh=mesh, s=48, causal=True, order="zigzag")
    asked: dict[str, Counter[int]] = {"forward": Counter(), "backward": Counter()}

    def watched(name: str) -> None:
        kernel = getattr(ring, name)

        def call(*operands: Any) -> Any:
            (block,) = (x for x in operands if isinstance(x, Block))
            asked[name][rank_state.current().rank] += block.pairs
            return kernel(*operands)

        monkeypatch.setattr(ring, name, call)

    for name in asked:
        watched(name)
    around(case, operands(case))
    whole_work = case.s * (case.s + 1) // 2
    for work in asked.values():
        assert work == dict.fromkeys(range(case.ways), whole_work // case.ways)


def test_runs_without_values() -> None:
    def task(here: Ranks) -> list[torch.Size]:
        q, k, v = (torch.empty(1, h, 8, 8, device="meta", requires_grad=True) for h in (4, 2, 2))
        out = ring_attention(q, k, v, causal=True, ring="cp", order="zigzag", window=5)
        torch.autograd.backward(out.sum())
        assert q.grad is not None
        assert k.grad is not None
        return [out.shape, q.grad.shape, k.grad.shape]

    shapes = on_a_fake_group({"cp": 4}, task)
    assert shapes == [(1, 4, 8, 8), (1, 4, 8, 8), (1, 2, 8, 8)]


def test_keeps_its_own_pieces_alone() -> None:
    kept: list[tuple[int, ...]] = []

    def task(here: Ranks) -> None:
        q, k, v = (torch.randn(1, h, 8, 6, requires_grad=True) for h in (4, 2, 2))

        def pack(x: torch.Tensor) -> torch.Tensor:
            kept.append(tuple(x.shape))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            ring_attention(q, k, v, causal=True, ring="cp")

    on_a_fake_group({"cp": 4}, task)
    assert sorted(kept) == [(1, 2, 8, 6), (1, 2, 8, 6), (1, 4, 8), (1, 4, 8, 6), (1, 4, 8, 6)]


def test_a_shift_is_counted_as_one_and_an_exchange_is_not() -> None:
    def task(here: Ranks) -> list[tuple[str, int, int]]:
        with Counting(here) as counted:
            transport.wait(transport.begin_shift(torch.zeros(2, 3), "cp", -2))
            transport.all_to_all(torch.zeros(8, 3), "cp")
        return [(row.kind, row.size_bytes, row.count) for row in counted.rows()]

    assert on_a_fake_group({"cp": 4}, task) == [("all_to_all", 96, 1), ("shift", 24, 1)]
