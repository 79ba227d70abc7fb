"""Hand-written derivatives (`torch.autograd.Function`): kept as one op, by their own backward.

An op of one has `FUNCTION` among its attrs: where the class is, what it is called with, and what
running it on fake tensors showed of it. A rule that the user registers under the op's kind, which
is the function's name, says how it may be split. Without one it is split as what it does shows:
every dim where it works element by element, forward and backward; else those that every op of both
treats as parallel.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.nouns.graph import Op
from autopar.rules.notation import Rule

FUNCTION = "function"
RULE = "rule"
"""The rule's text; empty where none is known."""
LINEAR = "backward_linear"
"""Whether the backward is linear in the gradients that come in."""


def elementwise_text(operands: int, results: int) -> str:
    """The rule of a function that works element by element, forward and backward."""
    return f"{', '.join(['...~'] * operands)} -> {', '.join(['...~'] * results)}"


def known_rule(op: Op) -> Rule | None:
    """The rule that follows from what the function does; None where that shows none."""
    text = op.attrs[FUNCTION].get(RULE)
    if not text:
        return None
    return Rule(text, saves=tuple(range(len(op.inputs))), flops=4.0, backward=2.0)


def as_differentiated(rule: Rule, op: Op) -> Rule:
    """``rule`` with what the function's backward allows: see `Rule.defers`."""
    # A function of JAX is written out as graphs, and has no `FUNCTION`.
    if op.attrs.get(FUNCTION, op.attrs).get(LINEAR, True):
        return rule
    return replace(rule, defers=False, linear=False)
