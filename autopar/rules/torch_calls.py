"""PyTorch ops that have no kind of their own and are called again as they were.

The op's attr ``torch`` holds the call: ``args`` with operands as ``"%0"``, and ``kwargs``.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.graph import Op, Tensor
from autopar.rules.notation import Rule
from autopar.rules.registry import RuleMaker
from autopar.rules.terms import letters, positive, text


def _dim(op: Op, place: int, rank: int) -> int:
    """The call's ``dim``, at ``place`` among its arguments or by name; the last one by default."""
    call = op.attrs.get("torch", {})
    args, kwargs = call.get("args", ()), call.get("kwargs", {})
    return positive(int(args[place] if len(args) > place else kwargs.get("dim", -1)), rank)


def _along(place: int, saves_results: tuple[int, ...] = ()) -> RuleMaker:
    """An op that works along one dim, which stays whole; every tensor has its own extent of it."""

    def make(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
        rank = len(operands[0].shape)
        dim, names = _dim(op, place, rank), letters(rank)
        terms = [
            [f"{n}_{i}!" if d == dim else n for d, n in enumerate(names)]
            for i in range(len(operands) + len(results))
        ]
        count = len(operands)
        return Rule(
            text(terms[:count], terms[count:]), saves_results=saves_results, cost="reduction"
        )

    return make


def _baddbmm(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """The first operand is added to the product, once: k cannot leave partial sums."""
    del op, results
    saves = tuple(i for i, other in ((1, 2), (2, 1)) if operands[other].differentiable)
    rule = "b m n, b m k!, b k! n -> b m n"
    return Rule(rule, saves=saves, flops=2.0, backward=2.0, cost="matmul")


TORCH_CALLS: Mapping[str, Rule | RuleMaker] = {
    "aten::baddbmm": _baddbmm,
    "aten::diff": _along(2),
    "aten::sort": _along(1, (1,)),
    "aten::topk": _along(2, (1,)),
}
