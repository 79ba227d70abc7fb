"""Where numbers are equal, or at a limit, torch's ops differ in who has the gradient: a graph gives
it to whom the model does. A parameter that starts at zero is at a limit from the first step on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.nouns.mesh import Mesh
from autopar.nouns.workload import Workload
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage
from tests.frontends.torch_referee import compare

NUMBERS = torch.tensor(
    [
        [1.0, 1.0, 0.0, 0.0],
        [2.0, -1.0, 2.0, -1.0],
        [0.0, 0.0, 0.0, 0.0],
        [3.0, 3.0, 3.0, 3.0],
        [-1.0, -2.0, -2.0, -1.0],
    ]
)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(1).values,
    "max, kept": lambda x: x.max(1, keepdim=True).values,
    "max of all": lambda x: x.max(),
    "amax": lambda x: x.amax(1),
    "amax of two": lambda x: x.amax((0, 1)),
    "min": lambda x: x.min(1).values,
    "amin": lambda x: x.amin(1),
    "places of max": lambda x: x.gather(1, x.max(1, keepdim=True).indices),
    "places of min": lambda x: x.gather(1, x.argmin(1, keepdim=True)),
    "median": lambda x: x.median(1).values,
    "sorted": lambda x: x.sort(1, descending=True).values,
    "topk": lambda x: x.topk(2, 1).values,
    "running": lambda x: x.cummax(1).values,
    "prod": lambda x: x.prod(1),
    "norm": lambda x: x.norm(dim=1),
    "largest norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1),
    "logsumexp": lambda x: x.logsumexp(1),
    "maximum": lambda x: torch.maximum(x, x.flip(1)),
    "of zeros": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "clamp": lambda x: x.clamp(0, 1),
    "clamp to tensors": lambda x: torch.clamp(x, torch.zeros(4), torch.ones(4)),
    "clamp from below": lambda x: torch.clamp(x, min=x.detach().flip(1)),
    "relu6": lambda x: F.relu6(x * 6),
    "hardswish": lambda x: F.hardswish(x * 3),
    "threshold": lambda x: F.threshold(x, 1.0, 0.5),
    "softshrink": lambda x: F.softshrink(x, 1.0),
    "max_pool": lambda x: F.max_pool1d(x.unsqueeze(0), 2),
    "huber": lambda x: F.huber_loss(x, x.detach() - 1),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x.detach() - 1),
    "margin ranking": lambda x: F.margin_ranking_loss(x, x.flip(1), torch.ones_like(x)),
    "triplet": lambda x: F.triplet_margin_loss(x, x.flip(0), x.flip(1)),
    "multi margin": lambda x: F.multi_margin_loss(x, torch.tensor([0, 1, 2, 3, 0])),
    "cdist": lambda x: torch.cdist(x, x.flip(0)),
    "abs": lambda x: x.abs(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_goes_where_the_model_s_does(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = nn.Parameter(NUMBERS.clone())

        def forward(self, x: Tensor) -> Tensor:
            y = FUNCTIONS[name](self.numbers + x)
            return (y * torch.arange(1.0, y.numel() + 1).reshape(y.shape)).sum()

    zeros = torch.zeros_like(NUMBERS)
    assert compare(Workload(model=Model, batch=lambda: {"x": zeros})).worst < 1e-9


class _Limits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.low, self.high = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) + torch.clamp(self.low, min=torch.zeros(8))
        x = torch.max(x, torch.tensor(torch.finfo(torch.float32).min))
        low = torch.maximum(self.low, torch.zeros(8))
        high = torch.minimum(self.high, torch.tensor(1.0)) + self.low.view(2, 4).max(1).values.sum()
        return ((x - low) * high).square().mean()


@pytest.mark.parametrize("mesh", ["dp_replicate=2", "tp=2"])
def test_programs_say_so(mesh: str) -> None:
    torch.manual_seed(0)
    model, batch = _Limits(), {"x": torch.randn(4, 8)}
    captured = capture_of(lambda: model, lambda: dict(batch))
    made = emitted(captured, random_stage(captured, Mesh.parse(mesh), 1, 0))
    check(made, model, batch)
    assert ".max(1).values" in made.text
    assert "clamp(min=torch.finfo(torch.float32).min)" in made.text
