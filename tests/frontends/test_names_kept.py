"""The model's tensors keep their names whatever ops and arguments are called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.frontends.pytorch.capture import capture
from autopar.frontends.pytorch.errors import BatchError


class Layer(nn.Module):
    x: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Parameter(torch.randn(16, 16) / 4)
        self.register_buffer("x", torch.ones(16))
        self.tanh = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x * self.x, self.linear).tanh()
        return y * self.tanh


class Net(nn.Module):
    square: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Layer()
        self.mean = nn.Parameter(torch.ones(16))
        self.register_buffer("square", torch.ones(16))
        self.relu = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x)).mean(1, keepdim=True)
        return (x.square() * self.square - self.mean).relu().mean()


class Masked(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("mask", torch.ones(16))
        self.register_buffer("y", torch.ones(16))

    def forward(self, mask: Tensor, y: Tensor) -> Tensor:
        return (self.weight * mask * self.mask * y).square().mean()


def _held(model: nn.Module) -> set[str]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name for name, _ in named}


def test_ops_give_way_to_tensors_of_the_model() -> None:
    made = capture(autopar.Workload(model=Net, batch=lambda: {"x": torch.randn(4, 16)}))
    names = {t.name for t in made.graph.tensors.values() if t.role in ("parameter", "buffer")}
    for block in made.graph.blocks.values():
        for instance in block.instances:
            tensors = block.body.tensors.values()
            names |= {f"{instance}.{t.name}" for t in tensors if t.role in ("parameter", "buffer")}
    assert names == _held(Net())


def test_an_entry_of_the_batch_named_like_a_tensor() -> None:
    """Only where the model reads that tensor: `y` it does not."""

    def batch() -> dict[str, Tensor]:
        return {"mask": torch.ones(4, 16), "y": torch.ones(4, 16)}

    with pytest.raises(BatchError, match=r"batch\['mask'\] is named like a buffer of the model"):
        capture(autopar.Workload(model=Masked, batch=batch))


def test_a_tensor_that_is_not_read_gives_its_name_away() -> None:
    def batch() -> dict[str, Tensor]:
        return {"y": torch.ones(4, 16)}

    class Unread(Masked):
        def forward(self, y: Tensor) -> Tensor:  # type: ignore[override]
            return (self.weight * y).square().mean()

    assert capture(autopar.Workload(model=Unread, batch=batch)).graph.inputs == ("y",)
