"""What attention says of a mask of places: nothing, causal, or a window."""

from __future__ import annotations

from autopar.frontends.pytorch.facts import Choice, Test, inverse
from autopar.frontends.pytorch.ir import Node
from autopar.nouns.windows import strip_rows

HUGE = -1e9
"""Added to a score it leaves a weight of exactly 0."""

Form = tuple[tuple[str, object], ...]
"""Attributes of attention that hide what the mask hides."""


def has_mask(node: Node) -> bool:
    """Whether it is attention under a mask, its fourth operand; sinks stand behind that."""
    beside = 3 + bool(node.attrs.get("sinks"))
    packed = node.attrs.get("documents")
    return node.kind == "attention" and len(node.inputs) > beside and not packed


def form_of(test: Test) -> Form | None:
    """Of a test of rows and as many columns, the last two dims; None where attention has no words
    for it."""
    if test.never or (not test.always and test.shape[-1] != test.shape[-2]):
        return None
    if test.always:
        return (("causal", False),)
    window, columns = _window(test), test.shape[-1]
    if window is None:
        return None
    if window == columns:
        return (("causal", True),)
    return (("causal", True), ("window", window), ("strip", strip_rows(window, columns)))


def _window(test: Test) -> int | None:
    """How many columns a row sees, itself the last; all of them where it is causal."""
    below = (0,) * (len(test.shape) - 2) + (1, -1)
    above = tuple(-c for c in below)
    if test.least == {(below, 0)}:
        return test.shape[-1]
    back = [const for coefficients, const in test.least if coefficients == above]
    if len(back) == 1 and test.least == {(below, 0), (above, back[0])}:
        return back[0] + 1
    return None


def seen(fact: Choice) -> Test | None:
    """Where a mask that is added to the scores leaves them, if it hides the rest."""
    if fact.inside == 0 and fact.outside <= HUGE:
        return fact.test
    return inverse(fact.test) if fact.outside == 0 and fact.inside <= HUGE else None
