"""The text of a layout reads back, and what cannot be pinned says what can."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from autopar.nouns.axes import AXES
from autopar.nouns.buckets import MIB
from autopar.nouns.grammar import WORDS, Grammar, pairs_of
from autopar.nouns.layout import BUCKET, NAMES, Layout, LayoutError, Pins
from autopar.nouns.recompute import ATTENTION, FULL, Recompute
from autopar.planner.family.pins import GRAMMAR as FIGURES
from autopar.planner.family.pins import RECOMPUTES, completed, parse_pins

TEXTS = ("schedule", "attention", "kernels")
COUNTS = st.integers(1, 10**6)
PINS = st.builds(
    Pins,
    **{name: st.none() | COUNTS for name in NAMES if name not in (*WORDS, *TEXTS, BUCKET)},
    bucket=st.none() | st.integers(1, 10**5).map(lambda n: n * MIB),
    reduce=st.none() | st.sampled_from(WORDS["reduce"]),
    zero=st.sampled_from([None, 0, 1, 2, 3]),
    attention=st.sampled_from([None, "cudnn", "my_kernels:attend"]),
    kernels=st.sampled_from([None, "torch", "triton"]),
    schedule=st.sampled_from([None, "1f1b", "mine.txt"]),
    recompute=st.none() | st.sampled_from(WORDS["recompute"]).map(Recompute),
    offload=st.none() | st.sampled_from(WORDS["offload"]),
    sequence_parallel=st.none() | st.booleans(),
    uneven=st.none() | st.booleans(),
)


@given(PINS)
@settings(suppress_health_check=[HealthCheck.too_slow])  # some thirty draws for each
def test_pins_read_back(pins: Pins) -> None:
    assert Grammar().read(pairs_of([str(pins)])) == pins


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    interleave = draw(st.sampled_from([1, 2]))
    choices: dict[str, Any] = {name: draw(st.sampled_from([1, 2, 4])) for name in AXES}
    choices |= {"cp_outer": 1, "cp_head": 1, "tp2": 1}  # what figures alone do not price
    return Layout(
        global_batch=draw(COUNTS),
        microbatch=draw(COUNTS),
        zero=draw(st.sampled_from([1, 2, 3])),
        schedule="interleaved-1f1b" if interleave > 1 else draw(st.sampled_from(["1f1b", "zb-v"])),
        interleave=interleave,
        recompute=draw(st.sampled_from(RECOMPUTES)),
        sequence_parallel=draw(st.booleans()),
        etp=draw(st.sampled_from([0, 1, 2])),
        uneven=draw(st.booleans()),
        **choices,
    )


@given(layouts().filter(lambda x: x.dp_replicate == 1 or x.dp_shard * x.cp > 1))
@settings(max_examples=200)
def test_layouts_read_back(layout: Layout) -> None:
    """What is left out is what they are completed by."""
    for text in (str(layout), str(layout.shortest())):
        assert completed(parse_pins([text]), layout.device_count) == layout


def test_a_layout_has_a_degree_for_each_axis() -> None:
    assert {*AXES} <= {*NAMES} & {field.name for field in fields(Layout)}


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "compute x 5 + selective-op",
        "selective(layernorm+moe_act)",
        "full x 0.3",
        "selective",
    ],
)
def test_recompute_reads_back(text: str) -> None:
    assert str(Recompute.parse(text)) == text


def test_programs_run_no_policy_of_figures() -> None:
    assert Recompute(FULL).emitted
    assert not Recompute(ATTENTION).emitted
    assert not Recompute(FULL, share=0.5).emitted


@pytest.mark.parametrize(
    ("grammar", "text", "says"),
    [
        (Grammar(), "width=2", "'width' cannot be fixed. Choose among dp_replicate, dp_shard, tp"),
        (Grammar(names=("tp",), alone=("ep",)), "dp=2", "Choose among tp; ep, recompute=selective"),
        (Grammar(devices=8), "tp=0", "on 8 devices tp may be 1, 2, 4 or 8"),
        (Grammar(devices=8), "microbatch=x", "samples that one microbatch has on one data rank"),
        (Grammar(), "zero=4", "choose 0, 1, 2 or 3 "),
        (Grammar(), "uneven=1", "choose on or off"),
        (Grammar(), "recompute=full x 0.3", "--fix 'x' is not KEY=VALUE"),
        (FIGURES, "recompute=compute", "choose none, selective or full"),
    ],
)
def test_what_cannot_be_pinned_says_what_can(grammar: Grammar, text: str, says: str) -> None:
    with pytest.raises(LayoutError) as refused:
        grammar.read(pairs_of([text]))
    assert says in str(refused.value)
