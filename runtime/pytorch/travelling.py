"""Rows that travel to other ranks, and their gradients back, while something else is computed.

``wait_rows(begin_rows(x, ...))`` exchanges rows. What stands between the two calls hides the
exchange; what autograd runs between their backwards, in the opposite order, hides that of the
gradients. Rows that are sent and received differ in number, so what autograd sees pass between the
two is a ticket without content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from autopar.runtime.pytorch import transport
from autopar.runtime.pytorch.collectives import apply


@dataclass(frozen=True, slots=True)
class Exchange:
    """Of rows along ``axis``: how many go to each rank and come from it, and as how many each is
    counted (`transport.begin_all_to_all_rows`)."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    axis: str
    counted: int

    @property
    def back(self) -> Exchange:
        return Exchange(self.received, self.sent, self.axis, self.counted)

    def begin(self, x: Tensor) -> Tensor:
        return transport.begin_all_to_all_rows(x, self.sent, self.received, self.axis, self.counted)


@dataclass(slots=True, eq=False)
class Travelling:
    """Rows, or their gradients, that are to be read after `transport.wait` alone; ``ticket``: what
    autograd knows of them."""

    exchange: Exchange
    coming: Tensor | None = None
    ticket: Tensor | None = None

    def arrive(self) -> Tensor:
        coming, self.coming = self.coming, None
        assert coming is not None, "rows arrive once"
        return transport.wait(coming)


def begin_rows(x: Tensor, exchange: Exchange) -> Travelling:
    """[sum(sent), d] leave; every rank along the axis must call, and `wait_rows` must be given what
    it returns."""
    travelling = Travelling(exchange)
    travelling.ticket = apply(_Begin, x, travelling)
    return travelling


def wait_rows(travelling: Travelling) -> Tensor:
    """[sum(received), d], when they are there."""
    rows: Tensor = apply(_Wait, travelling.ticket, travelling)
    return rows


def exchange_rows(x: Tensor, exchange: Exchange) -> Tensor:
    """[sum(sent), d] -> [sum(received), d]; gradients travel the same way back."""
    return wait_rows(begin_rows(x, exchange))


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, travelling: Travelling) -> Tensor:
        ctx.travelling = travelling
        travelling.coming = travelling.exchange.begin(x)
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        del grad
        return ctx.travelling.arrive(), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, travelling: Travelling) -> Tensor:
        ctx.travelling = travelling
        return travelling.arrive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.travelling.coming = ctx.travelling.exchange.back.begin(grad)
        return grad.new_zeros(()), None
