"""What rules say is kept for backward, against what autograd keeps when the reference op runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.rules.held_bytes import kept_bytes
from autopar.rules.registry import bind
from autopar.runtime.pytorch.feed_forward import feed_forward
from autopar.runtime.pytorch.loss_head import linear_cross_entropy
from tests.rules.cases import CASES
from tests.rules.drawing import Draw, case
from tests.rules.lax_cases import LAX_CASES
from tests.rules.reference import Call, run

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

# Where PyTorch on a CPU keeps something else than the implementation that the rule stands for.
ELSEWHERE = {
    "dropout": "the mask has the input's dtype here and one byte an element on accelerators",
    "rms_norm": "small ops that keep the normalised input, too; one fused kernel on accelerators",
    "attention": "small odd shapes take the composed path, which keeps all scores",
    "experts": "the reference runs all experts for all tokens; `test_experts` has the program's",
    "grouped_linear": "the reference has a matrix for each row; programs of JAX keep rows in order",
    "gated_activation": "the reference keeps the activation; tests/runtime tries the program's",
    "linear_cross_entropy": "the reference keeps logits; the program's is tried below",
    "feed_forward": "the reference keeps what stands between its products; the program's is tried "
    "below",
    **dict.fromkeys(LAX_CASES, "JAX keeps what its own derivatives name"),
    "aten::log_sigmoid": "a buffer, too; accelerators keep the input only",
    "aten::cosine_similarity": "small ops that keep the normalised operands, too",
    **dict.fromkeys(
        (f"aten::{cell}{one}" for cell in RECURRENT for one in ("", "_cell")),
        "small ops that keep their own results; one fused kernel on accelerators",
    ),
}


def _kept(operands: Sequence[Tensor], kind: str, call: Call) -> tuple[set[int], set[int], int]:
    """(operands, results, bytes of all else but numbers) that autograd keeps, by storage."""
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        results = run(kind, call)
    places = {t.untyped_storage().data_ptr(): i for i, t in enumerate(operands)}
    made = {t.untyped_storage().data_ptr(): i for i, t in enumerate(results)}
    rest = [t for at, t in seen.items() if t.dim() and at not in places and at not in made]
    return (
        {places[at] for at in seen if at in places},
        {made[at] for at in seen if at in made and at not in places},
        sum(math.prod(t.shape) * t.element_size() for t in rest),
    )


def _check(kind: str, operands: Sequence[Tensor], attrs: dict[str, object]) -> None:
    whole = case(kind, operands, attrs)
    if not any(r.requires_grad for r in whole.results):
        return
    bound = bind(whole.op, whole.nouns)
    shapes = tuple(tuple(r.shape) for r in whole.results)
    saved = _kept(operands, kind, Call(attrs, tuple(operands), shapes))
    declared = (
        set(bound.rule.saves),
        set(bound.rule.saves_results),
        sum(kept_bytes(bound)),
    )
    assert saved == declared, f"{kind} [{bound}] {attrs}"


@pytest.mark.parametrize("kind", sorted(set(CASES) - set(ELSEWHERE)))
@pytest.mark.some(120)
def test_rules_say_what_autograd_keeps(kind: str) -> None:
    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        operands, attrs = CASES[kind](Draw(data), kind)
        floats = [
            t.detach().float().requires_grad_(t.requires_grad) if t.dtype == torch.double else t
            for t in operands
        ]
        _check(kind, floats, attrs)

    check()


@pytest.mark.parametrize("shared", [1, 2])
def test_fused_attention_keeps_its_result_and_a_number_a_row(shared: int) -> None:
    q, k, v = (torch.rand(2, h, 5, 8).requires_grad_() for h in (2 * shared, 2, 2))
    for causal in (False, True):
        _check("attention", (q, k, v), {"causal": causal, "scale": None, "dropout_p": 0.0})


def test_a_fused_norm_keeps_less_than_the_composed_one() -> None:
    """The rule counts the fused kernel: x and one number a row; composed, one more x."""
    x, w = torch.rand(4, 8).requires_grad_(), torch.rand(8).requires_grad_()
    call = Call({"eps": 1e-5, "upcast": False, "scale_offset": 0}, (x, w), ((4, 8),))
    whole = case("rms_norm", (x, w), call.attrs)
    bound = bind(whole.op, whole.nouns)
    declared = sum(kept_bytes(bound))
    assert _kept((x, w), "rms_norm", call) == ({0, 1}, set(), declared + 4 * 8 * 4)


def test_a_dropout_mask() -> None:
    x = torch.rand(4, 8).requires_grad_()
    whole = case("dropout", (x,), {"p": 0.5})
    bound = bind(whole.op, whole.nouns)
    assert kept_bytes(bound) == [4 * 8]
    assert _kept((x,), "dropout", Call({"p": 0.5}, (x,), ())) == (set(), set(), 4 * 8 * 4)


@pytest.mark.parametrize("bias", [False, True])
def test_a_loss_head_keeps_its_gradients(bias: bool) -> None:
    x, weight, shift = (torch.rand(*n).requires_grad_() for n in ((6, 4), (9, 4), (9,)))
    held = (weight, shift) if bias else (weight,)
    labels = torch.arange(6)
    attrs = {
        "chunks": 2,
        "scale": 1.0,
        "cap": None,
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "reduction": "sum",
    }
    whole = case("linear_cross_entropy", (x, labels, *held), attrs)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        linear_cross_entropy(x, weight, labels, shift if bias else None, chunks=2)
    assert sum(t.nbytes for t in kept if t.dim()) == sum(kept_bytes(bind(whole.op, whole.nouns)))


@pytest.mark.parametrize("biased", [False, True])
def test_a_feed_forward_in_chunks_keeps_what_goes_in(biased: bool) -> None:
    x, up, gate, down = (
        torch.rand(*n).requires_grad_() for n in ((2, 6, 4), (5, 4), (5, 4), (3, 5))
    )
    shift = torch.rand(5).requires_grad_()
    attrs: dict[str, Any] = {
        "ups": 2,
        "biases": (1,) if biased else (),
        "gate": (("silu", (0,), {}), ("mul", (2, 1), {})),
        "transposed": False,
        "chunks": 2,
    }
    operands = (x, gate, up, down, *([shift] if biased else []))
    whole = case("feed_forward", operands, attrs)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def between(g: Tensor, h: Tensor) -> Tensor:
        return F.silu(g) * h

    second = (up, shift) if biased else up
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        feed_forward(x, (gate, second), down, gate=between, chunks=2)
    bound = bind(whole.op, whole.nouns)
    assert [*bound.rule.saves] == [*range(len(operands))]
    assert not kept_bytes(bound)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in operands}


def test_a_mask_of_features() -> None:
    x = torch.rand(4, 8, 5).requires_grad_()
    _check("dropout", (x,), {"p": 0.5, "features": True})


@pytest.mark.parametrize(("base", "exponent"), [(True, False), (False, True), (True, True)])
def test_a_power_keeps_its_result_for_any_tensor_exponent(base: bool, exponent: bool) -> None:
    operands = (torch.rand(3).requires_grad_(base), torch.rand(3).requires_grad_(exponent))
    _check("pow", operands, {})
