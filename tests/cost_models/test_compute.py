"""The roofline: rates add up, special entries go before general ones."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.catalogue import find_device
from autopar.cost_models.compute import (
    OP_CLASSES,
    OpClass,
    added_time_s,
    beside_product_s,
    efficiency,
    op_rate,
    op_time_s,
)
from autopar.cost_models.rates import fitted
from autopar.nouns.cluster import MeasuredRate, short_dtype

H100 = find_device("H100")
amounts = st.floats(0, 1e14)


@settings(max_examples=200, deadline=None)
@given(amounts, amounts, st.floats(1, 10), st.sampled_from(OP_CLASSES))
def test_more_work_never_takes_less(
    flops: float, moved: float, factor: float, op_class: OpClass
) -> None:
    less = op_time_s(H100, flops, moved, "bf16", op_class)
    assert less <= op_time_s(H100, flops * factor, moved * factor, "bf16", op_class)


def test_large_products_reach_what_was_measured() -> None:
    flops = 2 * 8192**3
    seconds = op_time_s(H100, float(flops), 3 * 2 * 8192.0**2, "torch.bfloat16", "matmul")
    assert flops / seconds == pytest.approx(fitted()["matmul_hopper"] * 989.4e12, rel=0.02)


def test_thin_products_and_few_keys_reach_less() -> None:
    sizes: dict[OpClass, str] = {"matmul": "thin_size", "attention": "attention_seq_hopper"}
    for op_class, size in sizes.items():
        rate = op_rate(H100, "bf16", op_class)
        full_s = rate.time_s(1e14, 0.0, launches=False) - rate.half_s
        half_s = rate.time_s(1e14, 0.0, launches=False, thinness=1 / fitted()[size]) - rate.half_s
        assert half_s == pytest.approx(2 * full_s)


def test_an_attention_of_one_wave_of_rows_reaches_half() -> None:
    """More rows take that long again only once: the time of an idle wave."""
    rate, wave = op_rate(H100, "bf16", "attention"), fitted()["attention_rows_hopper"]
    full_s, one_s, eight_s = (
        rate.time_s(flops, 0.0, launches=False, rows=rows) - rate.half_s
        for flops, rows in ((1e13, 0.0), (1e13, wave), (8e13, 8 * wave))
    )
    assert one_s == pytest.approx(2 * full_s)
    assert eight_s == pytest.approx(9 * full_s)
    assert op_rate(H100, "bf16", "matmul").half_rows == 0
    assert op_rate(find_device("cpu-core"), "fp32", "attention").half_rows == 0


def test_small_heads_reach_less() -> None:
    rates = [op_rate(H100, "bf16", "attention", head_dim=d).s_per_flop for d in (32, 64, 128, 256)]
    assert rates == sorted(rates, reverse=True)


def test_streams_are_bound_by_memory() -> None:
    seconds = op_time_s(H100, 1e9, 3e9, "bf16", "elementwise")
    assert seconds == pytest.approx(3e9 / (fitted()["memory"] * 3.35e12), rel=0.01)


def test_entries_say_how_they_were_found() -> None:
    assert efficiency(H100, "bf16", "matmul").how == "fitted"
    assert efficiency(find_device("cpu-core"), "fp32", "matmul").how == "assumed"
    assert op_rate(H100, "bf16", "matmul").how == "fitted"
    assert efficiency(H100, "bf16", "elementwise").how == "fitted"
    assert efficiency(H100, "bf16", "gather").how == "assumed"


def test_wider_dtypes_stand_in_for_missing_ones() -> None:
    assert find_device("A100").peak("fp8") == find_device("A100").peak("bf16")
    assert find_device("V100").peak("bf16") == find_device("V100").peak("fp16")
    assert short_dtype("torch.bfloat16") == "bf16"


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(ValueError, match="no op class"):
        op_time_s(H100, 1.0, 1.0, "bf16", "magic")  # type: ignore[arg-type]


def test_what_a_step_adds_to_kernels_is_priced_where_it_was_not_measured() -> None:
    """Profiles measure products and backward passes as steps have them: nothing is added there."""
    measured = replace(H100, rates=(MeasuredRate("matmul", "bf16", 1e-6, 1e-15, 1e-12),))
    assert beside_product_s(H100) > beside_product_s(find_device("TPU-v5p")) > 0
    assert added_time_s(H100, 2e9) == 2 * added_time_s(H100, 1e9) > 0
    for one in (measured, find_device("cpu-core")):
        assert beside_product_s(one) == added_time_s(one, 1e9) == 0
