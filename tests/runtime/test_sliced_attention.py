"""Attention slice by slice is that of whole tensors, forward and backward, and leaves nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.runtime.pytorch.pipeline.stage_run import StageRun
from autopar.runtime.pytorch.recomputing import recompute
from autopar.runtime.pytorch.sequence_slices import Sequences, at
from autopar.runtime.pytorch.sliced_attention import sliced_attention
from autopar.runtime.pytorch.stage import Stage, Value
from autopar.runtime.shared.settings import ProgramError, Settings
from tests.runtime.ring_cases import CASES
from tests.runtime.ring_ranks import Case, Results, cut, farthest, operands, own_mask, whole

LIMIT = 1e-9
LAYER = ("a layer", "attention")
MASKED = tuple(
    name
    for name, case in CASES.items()
    if case.causal and case.order == "contiguous" and not case.trained and case.b
)


def slice_by_slice(case: Case, given: dict[str, Tensor], policy: str = "none") -> Results:
    """All slices forward, then all of them back; a block around each may run again."""
    sequences, outs, leaves = Sequences(), list[Tensor](), list[list[Tensor]]()
    for i in range(case.ways):
        q, k, v = (cut(given[x], 2, case, i).detach().clone().requires_grad_() for x in "qkv")
        own = [q, k, v]
        asked: dict[str, Any] = {"window": case.window}
        if (mask := given.get("mask")) is not None:
            asked["mask"] = own_mask(mask, case, i).detach().clone()
        if case.documents:
            asked["documents"] = (cut(given["documents"], 1, case, i), given["documents"])
        if case.sinks:
            own.append(given["sinks"].detach().clone().requires_grad_())
            asked["sinks"] = own[-1]

        def attend(q: Tensor, k: Tensor, v: Tensor, asked: dict[str, Any] = asked) -> Tensor:
            made = sliced_attention(q, k, v, scale=case.scale, earlier=LAYER, **asked)
            return torch.as_tensor(made * 1.0)

        with at(sequences, i, case.ways):
            outs.append(attend(q, k, v) if policy == "none" else recompute(attend, q, k, v))
        leaves.append(own)
    for i in reversed(range(case.ways)):
        with at(sequences, i, case.ways, forward=False):
            torch.autograd.backward(outs[i], cut(given["grad"], 2, case, i))
    (pieces,) = sequences.pieces.values()
    assert not pieces.pairs  # of no slice once its backward is done
    assert not pieces.sums
    grads = [[x.grad for x in own] for own in leaves]
    q, k, v = (torch.cat([own[j] for own in grads], 2) for j in range(3))  # type: ignore[misc]
    sinks = None
    if case.sinks:
        sinks = torch.stack([own[3] for own in grads]).sum(0)  # type: ignore[misc]
    return Results(torch.cat([o.detach() for o in outs], 2), q, k, v, None, sinks)


@pytest.mark.parametrize("slices", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MASKED)
def test_agrees_with_whole_tensors(name: str, slices: int) -> None:
    case = replace(CASES[name], mesh=f"cp={slices}", s=24)
    given = operands(case)
    for what, distance in farthest(slice_by_slice(case, given), whole(case, given)).items():
        assert distance < LIMIT, what


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 5))
    s = n * draw(st.integers(1, 4))
    g = draw(st.integers(1, 3))
    packed = draw(st.booleans())
    ends = sorted(draw(st.sets(st.integers(1, s), max_size=4)) | {0, s}) if packed else []
    return Case(
        mesh=f"cp={n}",
        s=s,
        h=g * draw(st.integers(1, 3)),
        g=g,
        d=draw(st.integers(1, 5)),
        e=draw(st.integers(1, 5)),
        b=draw(st.integers(1, 2)),
        causal=True,
        window=draw(st.none() | st.integers(1, s + 2)),
        mask="" if packed else draw(st.sampled_from(["", "two dims", "keys", "added"])),
        documents=tuple(b - a for a, b in pairwise(ends)),
        sinks=packed and draw(st.booleans()),
        scale=draw(st.none() | st.floats(0.05, 2)),
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_agrees_whatever_the_sizes(case: Case) -> None:
    given = operands(case)
    for what, distance in farthest(slice_by_slice(case, given), whole(case, given)).items():
        assert distance < LIMIT, what


@pytest.mark.parametrize("name", ["window of two pieces", "sinks, documents"])
def test_a_block_that_runs_again_makes_the_same(name: str) -> None:
    case = replace(CASES[name], mesh="cp=3", s=24)
    given = operands(case)
    for what, distance in farthest(slice_by_slice(case, given, "full"), whole(case, given)).items():
        assert distance < LIMIT, what


def test_a_layer_that_is_called_twice_in_a_slice_is_refused() -> None:
    x = torch.ones(1, 1, 4, 2)
    with at(Sequences(), 0, 2):
        sliced_attention(x, x, x, earlier=LAYER)
        sliced_attention(x, x, x, earlier=("a layer", "attention_1"))
        with pytest.raises(ProgramError, match="ran twice in one slice"):
            sliced_attention(x, x, x, earlier=LAYER)


def test_a_step_that_ended_in_an_error_leaves_no_keys_to_the_next() -> None:
    def attend(x: Tensor) -> Tensor:
        return torch.as_tensor(sliced_attention(x, x, x, earlier=LAYER))

    stage = Stage(nn.Identity, 0, ("x",), ("y",))
    storage: Any = SimpleNamespace(settings=Settings(seq_slices=2), call=attend)
    values = {"y": Value((1, 1, 4, 2), "float64")}
    run = StageRun(0, stage, values, {"y": torch.float64}, storage)
    x = torch.randn(1, 1, 8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    early, late = x.chunk(2, 2)
    run.forward(0, {"x": 3 * early}, {})  # and nothing of that step after it
    made = [run.forward(i, {"x": part}, {})[0]["y"] for i, part in enumerate((early, late))]
    expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert torch.allclose(torch.cat(made, 2), expected, rtol=0, atol=LIMIT)


def test_what_it_cannot_do_is_refused() -> None:
    x = torch.ones(1, 1, 4, 2)
    with pytest.raises(ProgramError, match="outside of a stage"):
        sliced_attention(x, x, x, earlier=LAYER)
    with at(Sequences(), 0, 2), pytest.raises(ProgramError, match="is causal"):
        sliced_attention(x, x, x, causal=False, earlier=LAYER)
