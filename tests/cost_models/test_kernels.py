"""Formulas of single kernels: what must hold of each, and some figures that were published."""

from itertools import pairwise

import pytest

from autopar.cost_models.catalogue import find_device
from autopar.cost_models.kernels.attention import Attention, fused_attention_s, unfused_attention_s
from autopar.cost_models.kernels.chunked_loss import WAYS, Head, liger_chunks, loss_bytes, loss_s
from autopar.cost_models.kernels.constants import kernel_constants, kernel_table
from autopar.cost_models.kernels.decoder_step import Decoder, Narrowed, decoder_step_s
from autopar.cost_models.kernels.dispatch import Dispatch, low_latency_dispatch_s, node_dispatch_s
from autopar.cost_models.kernels.gated_mlp import EAGER, FUSED, TILED, Mlp, gated_mlp_s
from autopar.cost_models.kernels.memory_bound import KERNELS, memory_bound_s
from autopar.cost_models.kernels.narrow import cast_s, narrow_linear_s, trained_linear_s
from autopar.cost_models.kernels.node_collectives import (
    Node,
    direct_all_reduce_s,
    links_of,
    node_collective_s,
)
from autopar.cost_models.kernels.pieces import in_pieces_s, tile_by_tile_s, wave_product_s
from autopar.cost_models.kernels.products import product_s, product_share, sustained
from autopar.cost_models.kernels.routed_mlp import Routed, looped_mlp_s, routed_mlp_s

C = kernel_constants()
A100, H100, B200 = (find_device(name) for name in ("A100", "H100", "B200"))
LLAMA_HEAD = Head(rows=8192, width=4096, vocab=128256)
SIZES = (4096, 2**16, 2**20, 2**24, 2**29)


def rises(values: list[float]) -> bool:
    return all(later > earlier > 0 for earlier, later in pairwise(values))


def test_every_constant_has_a_reason_and_values_without_devices() -> None:
    for name, constant in kernel_table().items():
        assert constant.value > 0, name
        assert len(constant.basis) > 10, name
    assert kernel_constants("a device without rows") == C
    assert kernel_constants("B200") != C


def test_the_share_of_the_peak_falls_with_what_the_board_may_draw() -> None:
    shares = [product_share(device, C) for device in (A100, H100, B200)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.80, abs=0.05)  # 271 best of 312 TFLOP/s
    assert product_share(B200, sustained(C)) < shares[2]
    assert product_share(A100, sustained(C)) == pytest.approx(shares[0], abs=0.1)


def test_products_take_longer_the_more_they_are() -> None:
    for dtype in ("bf16", "fp8", "fp8_block", "nvfp4", "mxfp8"):
        assert rises(
            [product_s(B200, m, 4096, 4096, C, dtype) for m in (2**9, 2**12, 2**15, 2**17)]
        )
    quick = [product_s(B200, 2**15, 8192, 8192, C, dtype) for dtype in ("nvfp4", "fp8", "bf16")]
    assert rises(quick)
    assert product_s(H100, 8192, 8192, 8192, C) == pytest.approx(1.40e-3, rel=0.15)


def test_chunks_follow_the_ratio_of_vocabulary_and_width() -> None:
    assert [liger_chunks(rows, 4096, 128256) for rows in (4096, 8192, 16384, 32768)] == [32] * 4
    assert liger_chunks(32768, 768, 50257) == 64
    assert liger_chunks(1, 4096, 128256) == 1


@pytest.mark.parametrize("way", [("cross_entropy", "liger"), ("cross_entropy", "chunker")])
def test_chunks_cost_time_and_save_memory(way: tuple[str, str]) -> None:
    heads = [Head(8192, 4096, 128256, chunks) for chunks in (1, 2, 8, 32, 128)]
    assert rises([loss_s(A100, head, WAYS[way], C) for head in heads])
    assert rises([loss_bytes(head, WAYS[way]) for head in reversed(heads)])
    one, two, three = (
        loss_s(A100, Head(2**15, 4096, 128256, n), WAYS[way], C) for n in (8, 16, 24)
    )
    assert three - two == pytest.approx(two - one, rel=0.2)  # t0 + n d
    m = [loss_bytes(Head(2**15, 4096, 128256, n), WAYS[way]) for n in (8, 16, 32)]
    assert m[0] - m[1] == pytest.approx(2 * (m[1] - m[2]))  # m0 + N V b / n


def test_loss_heads_as_published_on_a100() -> None:
    fused = Head(8192, 4096, 128256, liger_chunks(8192, 4096, 128256))
    liger, eager = WAYS["cross_entropy", "liger"], WAYS["cross_entropy", "eager"]
    assert loss_bytes(LLAMA_HEAD, eager) / 2**20 == pytest.approx(9162, rel=0.005)
    assert loss_bytes(fused, liger) / 2**20 == pytest.approx(4467, rel=0.005)
    assert loss_s(A100, LLAMA_HEAD, eager, C) == pytest.approx(0.1115, rel=0.06)
    assert loss_s(A100, fused, liger, C) == pytest.approx(0.1667, rel=0.06)
    ways = [loss_s(A100, LLAMA_HEAD, eager, C, way) for way in ("fwd", "bwd", "full")]
    assert ways[0] + ways[1] == pytest.approx(ways[2])


def test_memory_bound_kernels_move_what_they_read_and_write() -> None:
    for name, kernel in KERNELS.items():
        for way in ("fwd", "bwd", "full"):
            times = [memory_bound_s(H100, kernel, n, 2, C, way) for n in (2**26, 2**28, 2**30)]
            assert rises(times), name
    fused, eager = KERNELS["rope", "fused"], KERNELS["rope", "eager"]
    elements = 16384 * 8192 * 1.25
    assert memory_bound_s(A100, fused, elements, 2, C, "fwd") == pytest.approx(4.1e-4, rel=0.1)
    assert memory_bound_s(A100, eager, elements, 2, C, "fwd") == pytest.approx(3.8e-3, rel=0.1)
    small = [memory_bound_s(A100, fused, n, 2, C) for n in (2**10, 2**16)]
    assert small[0] == small[1]  # the host's time
    norm = KERNELS["layer_norm", "library"]
    short, long = (memory_bound_s(H100, norm, 2**26, 4, C, "fwd", row) for row in (4096, 8192))
    assert long > short


def test_a_fused_mlp_is_no_slower_and_shards_cost() -> None:
    mlp = Mlp(8192, 4096, 14336)
    for way in ("fwd", "bwd", "full"):
        assert gated_mlp_s(B200, mlp, FUSED, C, way) < gated_mlp_s(B200, mlp, EAGER, C, way)
    shards = [gated_mlp_s(B200, Mlp(8192, 4096, 14336, n), TILED, C) for n in (1, 4, 16)]
    assert rises(shards)


def test_narrow_linears_gain_where_they_are_large() -> None:
    large, small = (2**14, 8192, 8192), (128, 1024, 1024)
    for dtype in ("fp8", "mxfp8", "nvfp4"):
        assert trained_linear_s(B200, *large, dtype, C) < trained_linear_s(B200, *large, "bf16", C)
        assert narrow_linear_s(B200, *small, dtype, C) > product_s(B200, *small, C)
        assert rises([cast_s(B200, n, dtype, C) for n in SIZES])
        assert cast_s(B200, 2**24, dtype, C, layouts=2) > cast_s(B200, 2**24, dtype, C)
    grouped = [trained_linear_s(B200, 2**16, 8192, 5120, "bf16", C, groups=g) for g in (0, 4)]
    assert grouped[1] > grouped[0]


def test_attention_grows_with_its_square_and_fused_is_quicker() -> None:
    shapes = [Attention(1, seq, 32, 8, 128, 128) for seq in (1024, 4096, 16384)]
    times = [fused_attention_s(H100, shape, "flash_new", C) for shape in shapes]
    assert rises(times)
    assert times[2] == pytest.approx(3.56e-3, rel=0.15)
    for shape, fused_s in zip(shapes, times, strict=True):
        assert unfused_attention_s(H100, shape, C) > fused_s
    whole = Attention(1, 4096, 32, 8, 128, 128, causal=False)
    assert fused_attention_s(H100, whole, "flash_new", C) > times[1]
    old = [fused_attention_s(B200, shapes[2], kernel, C) for kernel in ("flash_new", "flash")]
    assert old[1] > 2 * old[0]  # Ampere's instructions


def test_a_loop_over_experts_pays_for_each() -> None:
    few, many = (Routed(8192, 2048, 768, experts, 8) for experts in (8, 128))
    assert rises([looped_mlp_s(H100, mlp, C) for mlp in (few, many)])
    for mlp in (few, many):
        assert routed_mlp_s(H100, mlp, C) < looped_mlp_s(H100, mlp, C)
    assert looped_mlp_s(H100, many, C) == pytest.approx(0.255, rel=0.15)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_collectives_rise_with_bytes(kind: str) -> None:
    for device, links in ((A100, 300e9), (H100, 450e9), (B200, 900e9)):
        for ranks in (2, 4, 8):
            node = Node(device, links, ranks)
            assert rises([node_collective_s(node, kind, size, C) for size in SIZES])
    assert node_collective_s(Node(H100, 450e9, 1), kind, 2**20, C) == 0.0


def test_collectives_as_published() -> None:
    eight = Node(H100, links_of("H100-SXM-80GB"), 8)
    assert node_collective_s(eight, "all_gather", 2**29, C) == pytest.approx(1.40e-3, rel=0.1)
    assert node_collective_s(eight, "all_reduce", 2**29, C) == pytest.approx(2.11e-3, rel=0.1)
    assert node_collective_s(eight, "reduce_scatter", 4096, C) == pytest.approx(1.06e-5, rel=0.2)
    assert direct_all_reduce_s(eight, 4096, C, 2e6) < node_collective_s(
        eight, "all_reduce", 4096, C
    )
    assert links_of("L20-PCIe") == links_of("an unknown card") == 25e9


def test_dispatches_rise_with_ranks_outside_the_node() -> None:
    sizes = [Dispatch(128, 7168, 8, ranks, 1.0) for ranks in (8, 16, 64, 256)]
    times = [low_latency_dispatch_s(d, 200e9, 50e9, C) for d in sizes]
    assert rises(times)
    assert times[-1] == pytest.approx(194e-6, rel=0.15)
    inside = Dispatch(4096, 7168, 8, 8, 2.0)
    slow, quick = (node_dispatch_s(inside, 900e9, processors, C) for processors in (8, 24))
    assert slow > quick


def test_pieces_gain_where_rows_are_many() -> None:
    node = Node(H100, 450e9, 8)
    gains = []
    for rows in (1024, 4096, 32768):
        whole_s = wave_product_s(H100, rows, 6656, 8192, C)
        piece_s = wave_product_s(H100, rows // 8, 6656, 8192, C)
        moved_s = node_collective_s(node, "all_gather", 2.0 * rows * 8192, C)
        assert in_pieces_s(whole_s, piece_s, moved_s, 1, C) == whole_s + moved_s
        assert tile_by_tile_s(whole_s, moved_s, 8) < whole_s + moved_s
        gains.append((whole_s + moved_s) / in_pieces_s(whole_s, piece_s, moved_s, 8, C))
    assert gains[0] < 1 < gains[2]
    assert gains == sorted(gains)


def test_a_step_gains_by_what_is_narrow() -> None:
    model = Decoder(32, 4096, 14336, 32, 8, 128, 128256)
    ways = [Narrowed("mxfp8"), Narrowed("mxfp8", layers=16), Narrowed()]
    times = [decoder_step_s(B200, model, 32, 2048, way, C) for way in ways]
    assert rises(times)
    routed = Decoder(2, 5120, 8192, 40, 8, 128, 202048, experts=16, visits=1)
    assert decoder_step_s(B200, routed, 8, 8192, Narrowed(grouped="mxfp8"), C) > 0
