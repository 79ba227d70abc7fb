"""One small op with values, and random sizes and values to make it of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from autopar.nouns.graph import Op
from autopar.nouns.graph import Tensor as Noun
from autopar.rules.strategies import flows
from tests.rules.reference import Call, run

SIZES = st.sampled_from((1, 2, 3, 4, 5, 6, 8))
SMALL = st.sampled_from((1, 2, 3, 4))


@dataclass(frozen=True)
class Case:
    """One op with values for its operands (leaves, float64 where they have gradients)."""

    op: Op
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    @property
    def nouns(self) -> dict[str, Noun]:
        """The graph's tensors of this op."""
        pairs = zip(
            (*self.op.inputs, *self.op.outputs), (*self.operands, *self.results), strict=True
        )
        return {
            name: Noun(name, tuple(t.shape), str(t.dtype)[6:], "activation", t.requires_grad)
            for name, t in pairs
        }

    @cached_property
    def backward(self) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Random gradients of all results, and what they make of the operands that have some."""
        into, out = flows(self.op, self.nouns)
        generator = torch.Generator().manual_seed(11)
        arriving = [
            torch.rand(t.shape, dtype=torch.double, generator=generator) for t in self.results
        ]
        gradients = torch.autograd.grad(
            [r for r, g in zip(self.results, out, strict=True) if g],
            [o for o, g in zip(self.operands, into, strict=True) if g],
            [a for a, g in zip(arriving, out, strict=True) if g],
            retain_graph=True,
            materialize_grads=True,
        )
        return arriving, gradients


class Draw:
    """Sizes from hypothesis, values from a seeded generator."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))

    def of(self, *options: Any) -> Any:
        return self.data.draw(st.sampled_from(options))

    def size(self) -> int:
        return self.data.draw(SIZES)

    def small(self) -> int:
        return self.data.draw(SMALL)

    def flag(self) -> bool:
        return self.data.draw(st.booleans())

    def shape(self, least: int = 1, most: int = 3) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(self.data.draw(st.integers(least, most))))

    def dim(self, shape: Sequence[int]) -> int:
        return self.data.draw(st.integers(-len(shape), len(shape) - 1))

    def dims(self, shape: Sequence[int]) -> tuple[int, ...]:
        dims = self.data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
        return tuple(sorted(dims))

    def real(self, *shape: int, gradient: bool | None = None) -> Tensor:
        """Numbers away from zero, so that no derivative is undefined; sometimes a constant."""
        values = torch.rand(shape, generator=self.generator, dtype=torch.double) + 0.25
        wants = self.flag() or self.flag() if gradient is None else gradient
        return values.requires_grad_(wants)

    def signed(self, *shape: int) -> Tensor:
        x = self.real(*shape, gradient=False)
        flips = torch.randint(0, 2, shape, generator=self.generator) * 2 - 1
        return (x * flips).requires_grad_()

    def ids(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(0, bound, shape, generator=self.generator)

    def bits(self, *shape: int) -> Tensor:
        return self.ids(2, *shape).bool()

    def broadcast(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that broadcasts to ``shape``: leading dims gone, others shrunk to one."""
        left_out = self.data.draw(st.integers(0, len(shape)))
        return tuple(1 if self.of(False, False, True) else n for n in shape[left_out:])


def case(kind: str, operands: Sequence[Tensor], attrs: Mapping[str, Any]) -> Case:
    """An op of ``kind`` on these operands, its results computed."""
    results = run(kind, Call(attrs, tuple(operands), _result_shapes(kind, attrs)))
    op = Op(
        kind,
        tuple(f"in{i}" for i in range(len(operands))),
        tuple(f"out{i}" for i in range(len(results))),
        attrs,
    )
    return Case(op, tuple(operands), results)


def _result_shapes(kind: str, attrs: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    return (
        (attrs["shape"],) if kind in ("reshape", "expand", "full", "noise", "scatter_sum") else ()
    )
