"""Connectionist temporal classification: the loss of each sample by itself.

A sample's forward variables (Graves et al. 2006, equations 6 and 7) go over all of its times and
all places of its target, so only samples are split. In half precision it is computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.graph import DTYPE_BYTES, Op, Tensor
from autopar.rules.kept import Kept
from autopar.rules.notation import Rule, RuleMaker
from autopar.rules.terms import accumulated

STATES = 2
"""Of every place of a target, itself and the blank before it; one more blank stands at the end."""
FLOPS = 10.0
"""Of a state at one time: the largest of three ways in, three exponentials, their sum and its
logarithm, and the class's own."""


def _ctc_loss(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Kept are the forward variables; backward goes through as many states, and all classes.
    A batch whose targets are all shorter than s keeps less."""
    del results
    size = DTYPE_BYTES[accumulated(operands[0])]
    infinite = [Kept(("n",), size), Kept(("n",), 1)] if op.attrs["zero_infinity"] else []
    return Rule(
        "t! n c!, n s!, n, n -> n",
        saves=(0, 1),
        saves_results=() if infinite else (0,),
        keeps=(Kept(("n", "t", "s"), STATES * size), Kept(("n", "t"), size), *infinite),
        flop_terms=((STATES * FLOPS, ("n", "t", "s")),),
        backward=2.0,
        cost="reduction",
    )


CTC: Mapping[str, Rule | RuleMaker] = {"ctc_loss": _ctc_loss}
