"""Helpers for rules whose text depends on shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from autopar.nouns.graph import Op, Tensor
from autopar.rules.kept import Kept
from autopar.rules.notation import Rule


def letters(count: int, first: str = "a") -> list[str]:
    """``count`` factor names, from ``first`` on; x0, x1, ... where the alphabet ends."""
    start = ord(first)
    return [chr(start + i) if start + i <= ord("w") else f"x{i}" for i in range(count)]


def text(operands: Sequence[Sequence[str]], results: Sequence[Sequence[str]]) -> str:
    """The rule text of terms that are lists of written dims."""
    left = ", ".join(" ".join(t) for t in operands)
    return f"{left} -> {', '.join(' '.join(t) for t in results)}"


def positive(dim: int, rank: int) -> int:
    """``dim`` counted from the front."""
    return dim + rank if dim < 0 else dim


def dims_of(op: Op, name: str, rank: int) -> tuple[int, ...]:
    """Attr ``name`` as positive dims; absent, null or empty means all of them."""
    value = op.attrs.get(name)
    if value is None or value == ():
        return tuple(range(rank))
    if isinstance(value, int):
        return (positive(value, rank),)
    return tuple(sorted(positive(int(d), rank) for d in value))


def one_to_one(
    operand: tuple[int, ...], result: tuple[int, ...], whole: Collection[int], marks: str = "~"
) -> tuple[list[str], list[str]]:
    """Terms of an op that maps dim i to dim i; the dims in ``whole`` may change in size."""
    names = letters(len(operand))
    left, right = list(names), list(names)
    for i, name in enumerate(names):
        if i in whole:
            same = operand[i] == result[i]
            left[i], right[i] = f"{name}!", f"{name}!" if same else f"{name}_out!"
        else:
            left[i] = right[i] = name + marks
    return left, right


def accumulated(tensor: Tensor) -> str:
    """The dtype of sums over a tensor's elements inside an op: at least float32."""
    return "float64" if tensor.dtype == "float64" else "float32"


def product(rule: Rule) -> Callable[[Op, tuple[Tensor, ...], tuple[Tensor, ...]], Rule]:
    """``rule`` of a product: an operand is saved where another one needs it for its gradient. A
    linear layer that runs in 8 bits (`autopar.nouns.recipes`) holds both in these meanwhile."""

    def make(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
        del results
        made = replace(rule, saves=tuple(i for i in rule.saves if others_need(operands, i)))
        if "recipe" not in op.attrs:
            return made
        return replace(made, workspace=(Kept(("...", "k"), 1), Kept(("n", "k"), 1)), scaled=True)

    return make


def others_need(operands: Sequence[Tensor], position: int) -> bool:
    """Whether an operand other than ``position`` has a gradient."""
    return any(t.differentiable for i, t in enumerate(operands) if i != position)
