"""Work against PyTorch's own counts, and how it divides over ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.nouns.graph import Op, Tensor
from autopar.nouns.mesh import Mesh
from autopar.rules.extents import extents
from autopar.rules.flops import flops
from autopar.rules.held_bytes import kept_bytes
from autopar.rules.moved_bytes import bytes_moved
from autopar.rules.notation import Rule
from autopar.rules.registry import bind, register, unregister
from autopar.rules.strategies import Strategy
from autopar.rules.work import op_work
from autopar.rules.work_shape import rows_at_once, shape
from tests.rules.drawing import Case, case

TP2 = Mesh(("tp",), (2,))


def _real(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.double).requires_grad_(grad)


def _conv(groups: int) -> Case:
    attrs = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": groups}
    return case("conv", [_real(2, 4, 6, 6), _real(8, 4 // groups, 3, 3)], attrs)


def _attention(causal: bool) -> Case:
    attrs = {"causal": causal, "scale": None, "dropout_p": 0.0}
    return case("attention", [_real(2, 4, 8, 4) for _ in range(3)], attrs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: case("linear", [_real(3, 5, 8), _real(6, 8)], {}),
        lambda: case("linear", [_real(3, 5, 8, grad=False), _real(6, 8)], {}),
        lambda: case("matmul", [_real(2, 3, 4), _real(2, 4, 5)], {}),
        lambda: _conv(1),
    ],
)
def test_flops_are_those_that_pytorch_counts(make: Any) -> None:
    counted: list[int] = []
    with FlopCounterMode(display=False) as counter:
        whole: Case = make()
        counted.append(counter.get_total_flops())
        torch.autograd.backward([r.sum() for r in whole.results])
        counted.append(counter.get_total_flops() - counted[0])
    assert flops(bind(whole.op, whole.nouns), whole.op, whole.nouns) == tuple(counted)


def test_grouped_convolutions_do_a_share_of_the_work() -> None:
    one, two = (flops(bind(c.op, c.nouns), c.op, c.nouns) for c in (_conv(1), _conv(2)))
    assert two == (one[0] / 2, one[1] / 2)


def test_attention_counts_what_a_causal_mask_leaves() -> None:
    whole, causal = (_attention(c) for c in (False, True))
    full = flops(bind(whole.op, whole.nouns), whole.op, whole.nouns)
    assert list(full) == [4.0 * 2 * 4 * 8 * 8 * 4, 2.5 * 4 * 2 * 4 * 8 * 8 * 4]
    part = flops(bind(causal.op, causal.nouns), causal.op, causal.nouns)
    assert part[0] == pytest.approx(full[0] * (8 * 9 / 2) / 64)


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("window", [None, 40, 100, 256, 700])
@pytest.mark.parametrize("name", ["causal_rows", "zigzag_rows", "causal_ring", "zigzag_ring"])
def test_the_rank_with_most_of_a_sequence(name: str, window: int | None, ways: int) -> None:
    """Counted pair by pair. A ring's blocks of a narrow band have more; the mask has not."""
    rows = 800
    attrs = {"causal": True, "scale": None, "dropout_p": 0.0}
    attrs |= {} if window is None else {"window": window}
    whole = case("attention", [torch.empty(1, 1, rows, 4) for _ in range(3)], attrs)
    seen = [min(i + 1, window or rows) for i in range(rows)]
    size = rows // (2 * ways if "zigzag" in name else ways)
    pieces = [sum(seen[i : i + size]) for i in range(0, rows, size)]
    if "zigzag" in name:
        pieces = [a + b for a, b in zip(pieces[:ways], reversed(pieces[ways:]), strict=True)]
    choice = "s" if name == "causal_rows" else name
    mesh, strategy = Mesh(("cp",), (ways,)), Strategy.parse(f"cp:{choice}")
    got = flops(bind(whole.op, whole.nouns), whole.op, whole.nouns, strategy, mesh)[0]
    assert got == pytest.approx(16 * max(pieces), rel=0.02)


def test_work_divides_over_ranks() -> None:
    whole = case("linear", [_real(4, 6), _real(7, 6)], {})
    bound = bind(whole.op, whole.nouns)
    split = Strategy.parse("tp:k")
    assert flops(bound, whole.op, whole.nouns, split, TP2)[0] == 2 * 4 * 7 * 6 / 2
    # The rank with the larger piece of an uneven split sets the pace.
    assert extents(bound, Strategy.parse("tp:n"), TP2)["n"] == 4
    assert flops(bound, whole.op, whole.nouns, Strategy.parse("tp:D"), TP2)[0] == 2 * 4 * 7 * 6


def test_bytes() -> None:
    whole = case("linear", [_real(4, 6), _real(8, 6)], {})
    bound = bind(whole.op, whole.nouns)
    x, w, y = 4 * 6 * 8, 8 * 6 * 8, 4 * 8 * 8
    assert bytes_moved(bound, whole.op, whole.nouns) == (x + w + y, (x + w) + y + (x + w))
    split = Strategy.parse("tp:n")
    assert bytes_moved(bound, whole.op, whole.nouns, split, TP2) == (
        x + w / 2 + y / 2,
        (x + w / 2) + y / 2 + (x + w / 2),
    )


def test_a_lookup_reads_what_it_finds() -> None:
    whole = case("embedding", [torch.zeros(3, dtype=torch.long), _real(100, 4)], {})
    forward, _ = bytes_moved(bind(whole.op, whole.nouns), whole.op, whole.nouns)
    assert forward == 3 * 8 + 2 * (3 * 4 * 8)


def test_views_move_nothing() -> None:
    whole = case("transpose", [_real(3, 4)], {"dims": (1, 0)})
    work = op_work(whole.op, bind(whole.op, whole.nouns), Strategy(), TP2, whole.nouns)
    assert (work.forward_flops, work.forward_bytes, work.backward_bytes) == (0, 0, 0)


def test_kept_tensors_are_local() -> None:
    whole = _attention(False)
    bound = bind(whole.op, whole.nouns)
    assert kept_bytes(bound, Strategy.parse("tp:g"), TP2) == [2 * (4 // 2) * 8 * 4]
    assert math.prod(extents(bound, Strategy(), TP2).values()) == bound.points


def test_what_has_no_gradient_does_no_backward_work() -> None:
    tensors = {n: Tensor(n, (4,), "float32") for n in "xy"}
    register("mylib::thing", "a -> a")
    try:
        op = Op("mylib::thing", ("x",), ("y",))
        assert flops(bind(op, tensors), op, tensors) == (4.0, 0.0)
        assert bytes_moved(bind(op, tensors), op, tensors) == (32.0, 0.0)
    finally:
        unregister("mylib::thing")
    assert Rule("a -> a").flops == 1.0


def test_the_shape_of_products_and_attention() -> None:
    """Dims below a tile of 64 count as one; a split makes a product thinner."""
    product = case("linear", [_real(2, 128, 256), _real(512, 256)], {})
    bound = bind(product.op, product.nouns)
    thinness, _ = shape(bound, extents(bound, Strategy(), TP2))
    assert thinness == pytest.approx(1 / 256 + 1 / 512 + 1 / 256)
    split, _ = shape(bound, extents(bound, Strategy.parse("tp:n"), TP2))
    assert split == pytest.approx(1 / 256 + 1 / 256 + 1 / 256)
    batched = case("matmul", [_real(9, 128, 4), _real(9, 4, 256)], {})
    bound = bind(batched.op, batched.nouns)
    thinness, _ = shape(bound, extents(bound, Strategy(), TP2))
    assert thinness == pytest.approx(1 / 128 + 1 / 256 + 1 / 64)
    attrs = {"causal": True, "scale": None, "dropout_p": 0.0}
    mixing = case("attention", [_real(2, 4, n, 8) for n in (96, 128, 128)], attrs)
    bound = bind(mixing.op, mixing.nouns)
    assert shape(bound, extents(bound, Strategy(), TP2)) == (1 / 128, 8)
    assert rows_at_once(bound, extents(bound, Strategy(), TP2)) == 2 * 4 * 96
    assert rows_at_once(bound, extents(bound, Strategy.parse("tp:g"), TP2)) == 2 * 2 * 96
