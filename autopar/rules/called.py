"""Primitives of JAX that have no kind: an op says by a text how a program calls it again.

The text has ``{0}``, ``{1}``, ... for the operands; ``{window}`` for extents of a window on the
first operand, ``{made}`` for those of the result, both as a rank has them; ``{FP32}`` for a dtype
that verification widens. How such an op may be split stands beside, or does not: Shardy's pass says
it (`autopar.frontends.jax.shardy`), and planning tries it by execution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.nouns.graph import Op
from autopar.rules.notation import Cost, Rule

CALL, RULE, WINDOW = "call", "rule", "window"
"""Attrs of such an op: the text, the rule's text, and the window: its extent along each dim of the
first operand, `ALL` where that is the dim's own."""
ALL = -1
LIFTED: Mapping[str, str] = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
"""Names in programs of dtypes that verification widens."""

_BY_PLACE = ("gather", "scatter", "dynamic")
"""How the names of primitives begin that move numbers by places, and add some of them up: their
backward reads the places alone."""
_PRODUCTS = ("scatter-mul", "scatter-min", "scatter-max")


def is_called(op: Op) -> bool:
    return CALL in op.attrs


def given_rule(op: Op) -> Rule | None:
    """The rule that stands beside a call; None where none is known, and for other ops."""
    text = op.attrs.get(RULE) if is_called(op) else None
    if not text:
        return None
    name = op.kind.partition("::")[2]
    moves = name.startswith(_BY_PLACE) and name not in _PRODUCTS
    cost: Cost = "gather" if moves else "reduction"
    sums = "+" in text
    return Rule(
        text,
        linear=sums,
        partials=(len(op.inputs) - 1,) if sums else None,
        saves=tuple(range(1 if moves and not sums else 0, len(op.inputs))),
        flops=0.0 if moves else 1.0,
        cost=cost,
    )


def window_of(op: Op, shape: Sequence[object]) -> tuple[object, ...]:
    """The window on a first operand of ``shape``."""
    sizes = op.attrs.get(WINDOW, ())
    return tuple(n if size == ALL else size for n, size in zip(shape, sizes, strict=True))


def written(
    op: Op, operands: Sequence[str], dtypes: Mapping[str, str], window: str = "", made: str = ""
) -> str:
    """The call on ``operands``; ``dtypes``: what the names of `LIFTED` are written as."""
    text: str = op.attrs[CALL]
    return text.format(*operands, window=window, made=made, **dtypes)
