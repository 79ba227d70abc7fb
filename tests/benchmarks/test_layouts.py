"""The emitted side of the comparison has the very layout that stands on the other side by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from autopar.lowering.issued import activation_collectives
from autopar.planner import PlanResult, plan
from benchmarks.emitted_vs_handwritten import CLUSTER, LAYOUTS, MODEL, sent_bytes
from benchmarks.gpt import BATCH, LAYERS, LENGTH, WIDTH
from benchmarks.pinned import pin

ROOT = Path(__file__).parents[2]
ACTIVATION_BYTES = BATCH * LENGTH * WIDTH * 4


@pytest.fixture(scope="module")
def tensor_parallel() -> PlanResult:
    return plan(str(ROOT / MODEL), str(ROOT / CLUSTER), {"tp": "4"})


def moves(result: PlanResult) -> Counter[tuple[str, str]]:
    """How often each kind of collective moves a whole activation inside the blocks, in a step."""
    counts: Counter[tuple[str, str]] = Counter()
    for one in activation_collectives(result.lowered):
        if "::" in one.key and one.collective.size_bytes == ACTIVATION_BYTES:
            counts[one.direction, one.collective.kind] += one.count
    return counts


def test_tensor_parallel_is_megatrons(tensor_parallel: PlanResult) -> None:
    """Two all-reduces a layer forward, two backward (Shoeybi et al. 2019, figure 4)."""
    counts = moves(pin(tensor_parallel, LAYOUTS["tensor_parallel"].pins))
    assert counts == {
        ("forward", "all_reduce"): 2 * LAYERS,
        ("backward", "all_reduce"): 2 * LAYERS,
    }


def test_sequence_parallel_is_megatrons(tensor_parallel: PlanResult) -> None:
    """Each all-reduce becomes a gather and a scatter (Korthikanti et al. 2022, figure 5)."""
    counts = moves(pin(tensor_parallel, LAYOUTS["sequence_parallel"].pins))
    assert set(counts) == {
        (direction, kind)
        for direction in ("forward", "backward")
        for kind in ("all_gather", "reduce_scatter")
    }
    assert set(counts.values()) == {2 * LAYERS}


def test_two_tensor_axes_send_less_than_one(tensor_parallel: PlanResult) -> None:
    """Also than Megatron's one, of which a rank sends 3/4 of each of 4 activations a layer twice,
    and the embedding's beside them (the head's loss, norms and sums of gradients come on top)."""
    two = plan(str(ROOT / MODEL), str(ROOT / CLUSTER), LAYOUTS["tp_x_tp2"].fix)
    one = pin(tensor_parallel, LAYOUTS["tensor_parallel"].pins)
    assert sent_bytes(one) >= (4 * LAYERS + 1) * 2 * 3 / 4 * ACTIVATION_BYTES
    assert sent_bytes(two) < sent_bytes(tensor_parallel) < sent_bytes(one)


def test_a_pin_that_matches_nothing_is_refused(tensor_parallel: PlanResult) -> None:
    with pytest.raises(ValueError, match="no op is called"):
        pin(tensor_parallel, {"*no_such_op": "whole"})
