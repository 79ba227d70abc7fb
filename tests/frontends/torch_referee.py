"""Comparing a captured graph with the model itself, in float64, loss and every gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.frontends.pytorch import Captured, capture
from autopar.nouns.workload import Workload
from autopar.runtime.verify.pytorch.modes import FixedDraws, exact
from autopar.runtime.verify.pytorch.reference import in_pairs
from tests.frontends.torch_interpret import interpret


@dataclass(frozen=True)
class Compared:
    captured: Captured
    loss_error: float
    gradient_errors: dict[str, float]
    buffer_errors: dict[str, float]

    @property
    def worst(self) -> float:
        return max(self.loss_error, *self.gradient_errors.values(), *self.buffer_errors.values(), 0)


def compare(workload: Workload) -> Compared:
    """Captures ``workload``, runs model and graph on one batch, both wide and on fixed draws."""
    captured = capture(workload)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _compare(workload, captured)
    finally:
        torch.set_default_dtype(before)


def _compare(workload: Workload, captured: Captured) -> Compared:
    torch.manual_seed(0)
    assert workload.model is not None
    model: nn.Module = workload.model().double()
    batch = {
        name: value.double() if value.is_floating_point() else value.clone()
        for name, value in workload.batch().items()
    }
    for p in model.parameters():
        if p.is_complex():
            p.data = p.data.to(torch.complex128)
    held = {name: in_pairs(p.detach().clone()) for name, p in model.named_parameters()}
    held |= {name: b.clone() for name, b in model.named_buffers()}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                held[f"{path}.{key}" if path else key] = value.clone()
    for name, parameter in model.named_parameters():
        held[name].requires_grad_(parameter.requires_grad)
    with exact():
        result = model(**{name: value.clone() for name, value in batch.items()})
    loss = result if isinstance(result, Tensor) else result.loss
    loss.backward()
    with FixedDraws():  # ops of torch's own may draw inside
        mine = interpret(captured.graph, held, batch, wide=True)
    mine.backward()  # type: ignore[no-untyped-call]
    gradients = {
        name: _error(held[name].grad, None if p.grad is None else in_pairs(p.grad))
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    buffers = {
        name: _error(held[name], buffer)
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point()
    }
    return Compared(captured, _error(mine.detach(), loss.detach()), gradients, buffers)


def _error(mine: Tensor | None, true: Tensor | None) -> float:
    """Distance relative to the norm of what is true; absolute where that is below 1e-14."""
    if true is None:
        return 0.0 if mine is None else float(mine.norm())
    if mine is None:
        return float("inf")
    norm = float(true.norm())
    return float((mine - true).norm()) / (norm if norm > 1e-14 else 1.0)
