"""Hand-written derivatives (`torch.autograd.Function`): kept as one op, by their own backward.

An op of one has `FUNCTION` among its attrs: where the class is, what it is called with, and what
running it on fake tensors showed of it. A rule that the user registers under the op's kind, which
is the function's name, says how it may be split; where it was shown to work element by element,
forward and backward, that rule is known without.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.nouns.graph import Op
from autopar.rules.notation import Rule

FUNCTION = "function"
ELEMENTWISE = "elementwise"
"""Whether every element of results and gradients comes from those at the same place."""
LINEAR = "backward_linear"
"""Whether the backward is linear in the gradients that come in."""


def elementwise_rule(op: Op, operands: int, results: int) -> Rule | None:
    """The rule of a function that works element by element; None for any other."""
    if not op.attrs[FUNCTION][ELEMENTWISE]:
        return None
    text = f"{', '.join(['...~'] * operands)} -> {', '.join(['...~'] * results)}"
    return Rule(text, saves=tuple(range(operands)), flops=4.0, backward=2.0)


def as_differentiated(rule: Rule, op: Op) -> Rule:
    """``rule`` with what the function's backward allows: see `Rule.defers`."""
    # A function of JAX is written out as graphs, and has no `FUNCTION`.
    if op.attrs.get(FUNCTION, op.attrs).get(LINEAR, True):
        return rule
    return replace(rule, defers=False, linear=False)
