"""Branches that only check values pass, told by place; those where both sides compute do not.

PYTEST_DONT_REWRITE: asserts of models are read as they stand.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-call, no-any-return"
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.pytorch import capture, errors
from autopar.frontends.shared.captured import Captured
from autopar.nouns.workload import Workload

B, D = 4, 8
Body = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x))


def captured(body: Body) -> Captured:
    return capture(Workload(model=lambda: Model(body), batch=lambda: {"x": torch.ones(B, D)}))


def _if(h: Tensor) -> Tensor:
    if h.max() >= 100:
        raise ValueError("too large")
    return h.mean()


def _one_line(h: Tensor) -> Tensor:
    if torch.isnan(h).any(): raise ValueError("nan")  # noqa: E701  # fmt: skip
    return h.mean()


def _else(h: Tensor) -> Tensor:
    if (h < 9).all():
        total = h.mean()
    else:
        text = "not below 9"
        raise ValueError(text)
    return total


def _not(h: Tensor) -> Tensor:
    if not (h < 9).all():
        raise ValueError("not below 9")
    return h.mean()


def _and_not(h: Tensor) -> Tensor:
    mask = h < 9
    if mask is not None and not mask.all():
        raise ValueError("not below 9")
    return h.mean()


def _or(h: Tensor) -> Tensor:
    if h.isnan().any() or h.isinf().any() or not (h < 9).all():
        raise ValueError("bad")
    return h.mean()


def _and(h: Tensor) -> Tensor:
    if not (h.isfinite().all() and (h < 9).all()):
        raise ValueError("bad")
    return h.mean()


def _bool(h: Tensor) -> Tensor:
    if bool(h.isnan().any()):
        raise ValueError("nan")
    return h.mean()


def _elif(h: Tensor) -> Tensor:
    if h.shape[0] == 0:
        return h.sum()
    elif (h > 9).any():
        raise ValueError("bad")
    return h.mean()


def _assert(h: Tensor) -> Tensor:
    assert (h < 9).all(), "bad"
    return h.mean()


def _assert_or(h: Tensor) -> Tensor:
    assert (h < 9).all() or h.isnan().any()
    return h.mean()


def _check(h: Tensor) -> Tensor:
    torch._check(bool((h < 9).all()), lambda: "bad")
    return h.mean()


def _normal(h: Tensor) -> Tensor:
    return -torch.distributions.Normal(h, 1.0).log_prob(h.detach()).mean()


def _categorical(h: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=h).entropy().mean()


def _item(h: Tensor) -> Tensor:
    assert torch.all(h < 9).item(), "bad"
    return h.mean()


def _item_compared(h: Tensor) -> Tensor:
    assert h.max().item() <= 9
    return h.mean()


def _item_compared_in_an_if(h: Tensor) -> Tensor:
    if 9 < h.max().item() or h.isnan().any().item():
        raise ValueError("bad")
    return h.mean()


def _two_items_compared(h: Tensor) -> Tensor:
    if not h.min().item() != h.max().item():
        raise ValueError("all alike")
    return h.mean()


CHECKS = [
    _item,
    _item_compared,
    _item_compared_in_an_if,
    _two_items_compared,
    _if,
    _one_line,
    _else,
    _not,
    _and_not,
    _or,
    _and,
    _bool,
    _elif,
    _assert,
    _assert_or,
    _check,
]


@pytest.mark.parametrize("body", [*CHECKS, _normal, _categorical])
def test_checks_pass_and_are_told(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    # where anything was compiled in this process, distributions no longer check what they are given
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    result = captured(body)
    assert result.graph.ops[-1].kind == "mean" or body is _normal
    (note,) = result.notes
    assert "does not check values where the forward does" in note
    assert ("distribution" in note) if body in (_normal, _categorical) else (__file__ in note)


def _two_sides(h: Tensor) -> Tensor:
    if h.max() > 3:
        return h.mean()
    return h.sum()


def _returns(h: Tensor) -> Tensor:
    if h.isnan().any():
        return h.sum() * 0
    raise ValueError("unreachable")


def _caught(h: Tensor) -> Tensor:
    try:
        return _if(h)
    except ValueError:
        return h.sum()


def _caught_here(h: Tensor) -> Tensor:
    try:
        assert (h < 9).all()
    except AssertionError:
        h = h * 2
    return h.mean()


def _chosen(h: Tensor) -> Tensor:
    return h.mean() if h.max() > 3 else h.sum()


def _loop(h: Tensor) -> Tensor:
    while h.max() > 3:
        h = h / 2
    return h.mean()


def _computes_first(h: Tensor) -> Tensor:
    if h.max() > 3:
        for _ in range(2):
            h = h * 2
        raise ValueError("big")
    return h.mean()


def _kept(h: Tensor) -> Tensor:
    large = bool(h.max() > 3)
    if large:
        raise ValueError("big")
    return h.mean() * (1 + large)


def _drops_layers(h: Tensor) -> Tensor:
    for _ in range(2):
        if torch.rand([]) >= 0.1:
            h = h.tanh()
    return h.mean()


def test_layers_that_are_dropped_at_random_are_told() -> None:
    with pytest.raises(errors.DataDependentError, match=r"decides by a random number.*LayerDrop"):
        captured(_drops_layers)


def _item_decides(h: Tensor) -> Tensor:
    return h.mean() if h.max().item() > 3 else h.sum()


def _item_is_kept(h: Tensor) -> Tensor:
    assert (top := h.max().item()) < 9  # noqa: RUF018
    return h.mean() * top


def _item_in_a_sum(h: Tensor) -> Tensor:
    assert h.max().item() + h.shape[0] < 9
    return h.mean()


@pytest.mark.parametrize("body", [_item_is_kept, _item_in_a_sum])
def test_numbers_that_are_checked_and_computed_with(body: Body) -> None:
    notes = [note for note in captured(body).notes if "does not check values" in note]
    assert len(notes) == 1


def _item_between(h: Tensor) -> Tensor:
    assert 0 < h.max().item() < 9
    return h.mean()


def _item_caught(h: Tensor) -> Tensor:
    try:
        assert h.max().item() < 9
    except AssertionError:
        h = h * 2
    return h.mean()


REFUSED = [
    _item_decides,
    _item_between,
    _item_caught,
    _two_sides,
    _returns,
    _caught,
    _caught_here,
    _chosen,
    _loop,
    _computes_first,
    _kept,
]


@pytest.mark.parametrize("body", REFUSED)
def test_what_computes_by_a_value_is_refused(body: Body) -> None:
    with pytest.raises(errors.DataDependentError, match=r"torch\.where"):
        captured(body)
