"""Functions of torch by arguments that are seldom given: each is captured as what it computes."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-call, no-any-return"
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.planner import plan
from tests.frontends.test_torch_unseen import B, Body, D, checked, numbers

LABELS = torch.tensor([1, 3, -100, 0])


def _weighted(**given: Any) -> Body:
    """A cross-entropy with weights of classes and smoothed labels."""

    def body(m: Any, h: Tensor) -> Tensor:
        weight = torch.linspace(0.5, 2.0, D)
        labels = LABELS.masked_fill(LABELS == -100, given.get("ignore_index", -100))
        return F.cross_entropy(h, labels, weight=weight, label_smoothing=0.1, **given).mean()

    return body


def _of_images(m: Any, h: Tensor) -> Tensor:
    labels = torch.arange(B * 2).reshape(B, 2, 1) % 4
    logits = h.reshape(B, 4, 2, 1)
    return F.cross_entropy(
        logits, labels, weight=torch.linspace(1, 2, 4), label_smoothing=0.2, ignore_index=1
    )


def _gaussian(**given: Any) -> Body:
    def body(m: Any, h: Tensor) -> Tensor:
        mean, variance = h.chunk(2, dim=1)
        return nn.GaussianNLLLoss(**given)(mean, torch.ones(B, D // 2), variance.square()).sum()

    return body


def _one_variance(m: Any, h: Tensor) -> Tensor:
    return F.gaussian_nll_loss(h, torch.ones(B, D), h[:, 0].exp(), eps=0.9)


def _of_numbers(m: Any, h: Tensor) -> Tensor:
    """Numbers of the batch beside others; no gradient goes through them."""
    x = h.detach()
    made = torch.tensor([[x.sum(), 2], [x[0, 0], x.amax()]])
    whole = torch.tensor([x[0].sum().long(), 3], dtype=torch.int32) * torch.tensor((x.sum(), 1))
    return h.mean() * (made.square().sum() + whole.sum())


def _around(*pad: int) -> Body:
    def body(m: Any, h: Tensor) -> Tensor:
        x = h.reshape(B, 2, 4) if len(pad) == 2 else h.reshape(B, 2, 2, 2)
        x = F.pad(x, pad, mode="circular")
        return (x * torch.arange(x.numel()).view(x.shape)).mean()

    return body


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(D, D, 3)


def _scored(m: Any, h: Tensor) -> Tensor:
    return m.scorer.both(h, h.tanh()).square().mean()


def _solved(vectors: bool) -> Body:
    def body(m: Any, h: Tensor) -> Tensor:
        x = h.reshape(B, 2, 4)
        matrices = x @ x.transpose(1, 2) + torch.eye(2)
        return torch.linalg.solve(matrices, x[..., 0] if vectors else x).square().mean()

    return body


@pytest.mark.parametrize(
    ("body", "scorer"),
    [
        pytest.param(_weighted(), False, id="weights and smoothing"),
        pytest.param(_weighted(reduction="sum"), False, id="summed"),
        pytest.param(_weighted(reduction="none", ignore_index=3), False, id="each"),
        pytest.param(_of_images, False, id="of images"),
        pytest.param(_gaussian(), False, id="gaussian"),
        pytest.param(_gaussian(full=True, reduction="sum"), False, id="gaussian, whole"),
        pytest.param(_gaussian(reduction="none", eps=0.5), False, id="gaussian, least variance"),
        pytest.param(_one_variance, False, id="gaussian, a variance a sample"),
        pytest.param(lambda m, h: torch.cov(h.t()).square().mean(), False, id="covariance"),
        pytest.param(lambda m, h: h.cov(correction=0).square().mean(), False, id="uncorrected"),
        pytest.param(lambda m, h: torch.corrcoef(h).square().mean(), False, id="correlation"),
        pytest.param(_around(1, 2), False, id="padded around"),
        pytest.param(_around(1, 0, 2, 1), False, id="padded around twice"),
        pytest.param(_of_numbers, False, id="a tensor of tensors"),
        pytest.param(lambda m, h: torch.cov(input=h).square().mean(), False, id="by name"),
        pytest.param(
            lambda m, h: ((torch.zeros(B, 2, D) + h.unsqueeze(1)) ** 2).sum(1).mean(),
            False,
            id="zeros of a shape",
        ),
        pytest.param(
            lambda m, h: (torch.zeros(B, D) + m.linear.bias).mean() * h.mean(), False, id="spread"
        ),
        pytest.param(lambda m, h: (torch.zeros(D) + h.mean()).square().mean(), False, id="grown"),
        pytest.param(_scored, True, id="bilinear"),
        pytest.param(_solved(False), False, id="solved"),
        pytest.param(_solved(True), False, id="solved, vectors"),
    ],
)
def test_programs_compute_what_torch_does(body: Body, scorer: bool) -> None:
    def prepare(m: Any) -> None:
        if scorer:
            m.scorer = _Bilinear()

    assert numbers()["x"].shape == (B, D)
    checked(body, prepare)


MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
import autopar


class Model(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.made, self.up, self.down = made, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, y):
        loss = self.made(x)
        for i in range(2):
            loss = loss + F.cross_entropy(self.down(self.up(x[:, i]).relu()), y[:, i])
        return loss.sum()


def workload(made):
    return autopar.Workload(
        model=lambda: Model(made),
        batch=lambda: {"x": torch.randn(8, 2, 8), "y": torch.arange(16).view(8, 2) % 8},
    )


new = workload(lambda x: x.new_zeros(()))
number = workload(lambda x: torch.tensor(0.0))
row = workload(lambda x: torch.zeros(1))
one = workload(lambda x: torch.ones(()))
"""


@pytest.mark.parametrize("made", ["new", "number", "row", "one"])
def test_a_loss_may_be_added_up_from_a_number(made: str, tmp_path: Any) -> None:
    """Which counts once however many microbatches there are."""
    (tmp_path / "model.py").write_text(MODEL)
    fix = {"dp_shard": "2", "tp": "2", "microbatch": "1"}
    cluster = "examples/clusters/cpu_4.yaml"
    assert plan(f"{tmp_path}/model.py:{made}", cluster, fix).plan.microbatches == 4
