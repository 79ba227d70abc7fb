"""Reductions over dims: sums leave partial sums, everything else keeps the reduced dims whole."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.graph import DTYPE_BYTES, Op, Tensor
from autopar.rules.implementations.table import GLOBAL_COUNT
from autopar.rules.kept import Kept
from autopar.rules.notation import Implemented, Rule, RuleMaker
from autopar.rules.terms import dims_of, letters, one_to_one, text


def _reduced(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...], mark: str) -> str:
    """The rule text: reduced dims get ``mark`` and leave the result, or stay as ones."""
    rank = len(operands[0].shape)
    dims = dims_of(op, "dim" if "dim" in op.attrs else "dims", rank)
    names = letters(rank)
    left = [n + mark if i in dims else n for i, n in enumerate(names)]
    kept = len(results[0].shape) == rank
    right = ["1" if i in dims else n for i, n in enumerate(names) if kept or i not in dims]
    return text([left], [right])


def _sum(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    return Rule(_reduced(op, operands, results, "+"), linear=True, cost="reduction")


def _mean(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """A split mean divides the local sum by the global count: the pieces then add up."""
    written = _reduced(op, operands, results, "+")
    rank = len(operands[0].shape)
    dims = dims_of(op, "dims", rank)
    split = tuple(Implemented(n, GLOBAL_COUNT) for i, n in enumerate(letters(rank)) if i in dims)
    return Rule(written, linear=True, implementations=split, cost="reduction")


def _largest(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Those that share the gradient are found again; of one alone its place is kept."""
    written = _reduced(op, operands, results, "!")
    if not op.attrs.get("one"):
        return Rule(written, saves=(0,), saves_results=(0,), cost="reduction")
    rank = len(operands[0].shape)
    dims = dims_of(op, "dims", rank)
    left = tuple(n for i, n in enumerate(letters(rank)) if i not in dims)
    return Rule(written, keeps=(Kept(left, DTYPE_BYTES["int64"]),), cost="reduction")


def _flat(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """any, all, argmax: no gradient."""
    return Rule(_reduced(op, operands, results, "!"), cost="reduction")


def _variance(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    return Rule(_reduced(op, operands, results, "!"), saves=(0,), flops=3.0, cost="reduction")


def _best(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """top_k: values and places of the largest along one dim, which stays whole; k of them."""
    rank = len(operands[0].shape)
    (dim,) = dims_of(op, "dim", rank)
    names = letters(rank)
    left, right = ([f"{n}{m}!" if i == dim else n for i, n in enumerate(names)] for m in "xy")
    return Rule(text([left], [right] * len(results)), saves_results=(1,), cost="reduction")


def _running(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    shape = operands[0].shape
    left, right = one_to_one(shape, shape, dims_of(op, "dim", len(shape)), "")
    return Rule(text([left], [right]), linear=True, cost="reduction")


REDUCTIONS: Mapping[str, Rule | RuleMaker] = {
    "sum": _sum,
    "mean": _mean,
    "amax": _largest,
    "amin": _largest,
    "any": _flat,
    "all": _flat,
    "argmax": _flat,
    "var": _variance,
    "cumsum": _running,
    "jax::top_k": _best,
}
