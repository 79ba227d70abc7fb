"""Tensors made from nothing, triangles cut out of them, and what is left for the next step."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.graph import Op, Tensor
from autopar.rules.elementwise import TRANSCENDENTAL
from autopar.rules.notation import Rule, RuleMaker
from autopar.rules.terms import letters, text


def _filled(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """One value everywhere: a rank makes its own piece."""
    del op, operands
    return Rule(text([], [letters(len(results[0].shape))]), flops=0.0)


def _written(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """arange, constant: the values depend on the index, so every rank makes them all."""
    del op, operands
    return Rule(text([], [[f"{n}!" for n in letters(len(results[0].shape))]]), flops=0.0)


def _drawn(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Random numbers: a rank draws its own piece of the batch, and cuts its piece on a model axis
    out of what all ranks of the axis draw alike."""
    del op, operands
    return Rule(text([], [letters(len(results[0].shape))]), flops=TRANSCENDENTAL)


def _carried(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """What a buffer holds from the next step on: whole on every rank, as the buffer is."""
    del op, operands
    term = [f"{n}!" for n in letters(len(results[0].shape))]
    return Rule(text([term, term], [term]), flops=0.0)


FACTORIES: Mapping[str, Rule | RuleMaker] = {
    "full": _filled,
    "arange": _written,
    "constant": _written,
    "noise": _drawn,
    "carry": _carried,
    "tril": Rule("... m! n! -> ... m! n!", linear=True, flops=0.0),
    "triu": Rule("... m! n! -> ... m! n!", linear=True, flops=0.0),
}
