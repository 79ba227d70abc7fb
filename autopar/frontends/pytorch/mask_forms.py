"""What attention says of a mask of places: nothing, causal, or a window."""

from __future__ import annotations

from autopar.frontends.pytorch.ir import Node
from autopar.frontends.shared.facts import Choice, Test, inverse, seen_back
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
    if test.always:
        return (("causal", False),)
    window, columns = seen_back(test), test.shape[-1]
    if window is None:
        return None
    if window == columns:
        return (("causal", True),)
    return (("causal", True), ("window", window), ("strip", strip_rows(window, columns)))


def seen(fact: Choice) -> Test | None:
    """Where a mask that is added to the scores leaves them, if it hides the rest."""
    if fact.inside == 0 and fact.outside <= HUGE:
        return fact.test
    return inverse(fact.test) if fact.outside == 0 and fact.inside <= HUGE else None
