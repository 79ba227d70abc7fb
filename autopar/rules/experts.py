"""The experts of a layer: every token goes through the few that its route names.

A token needs nobody else's, so any axis may split tokens; the matrices of all experts are then
whole there, with gradients that are partial sums. An axis may split experts, whose results for all
tokens are shares of the sum, or tokens and experts at once: routes then travel to their experts and
back (Lepikhin et al. 2021, GShard, section 3.2). The width between the two products may be split
where that cuts the stored matrices into contiguous pieces: where no gate shares the first one, or
gate and gated values take turns in it. Where all gates lie before all gated values, a contiguous
piece has some of one alone: ranks then trade columns of what the first product gives. The result is
a sum over the pieces, to which a bias behind the second product would be added too often.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from autopar.nouns.graph import DTYPE_BYTES, Op, Tensor
from autopar.rules.gates import kept_of_gate
from autopar.rules.implementations.table import DISPATCH, HELD_EXPERTS, TRADED_HALVES
from autopar.rules.kept import Kept, Routed
from autopar.rules.notation import Implemented, Internal, Rule, RuleMaker
from autopar.rules.terms import text

INTEGER = 8
"""Bytes of a place in the order of tokens."""
_WAYS: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
STAYS = "stays"
"""The attr of experts to which no tokens travel: programs have no all-to-all of uneven rows."""
IMBALANCE = "imbalance"
"""The attr of what `Routed` has beside its factor, where routes are known to be uneven: ``(mean,
worst)``, and those of ranks where loads are known. Programs do not have it."""


def _experts(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Work and memory are those of the routes, n tokens times k experts each."""
    del results
    reads, bias = op.attrs["reads"], op.attrs["bias"]
    sliced = reads != "halves" and not bias
    inner, apart = "f+" if sliced else "f!", 2 if reads == "apart" else 1
    wide = {"pairs": f"({inner} p=2!)" if sliced else "g!", "halves": "g!"}.get(reads, inner)
    up, down = ["e+", wide, "d!"], ["e+", "d!", inner]
    if op.attrs["transposed"]:
        up, down = ["e+", "d!", wide], ["e+", inner, "d!"]
    terms = [["n", "d!"], ["n", "k!"], ["n", "k!"], *[up] * apart, down]
    if bias:
        terms += [["e+", wide], ["e+", "d!"]]
    between = {"pairs": ("f", "p") if sliced else ("g",), "halves": ("g",)}.get(reads, ("f",))
    return Rule(
        text(terms, [["n", "d!"]]),
        saves=tuple(range(3, 4 + apart)),
        keeps=_kept(op, operands, between),
        routed=Routed("e", *op.attrs[IMBALANCE]) if IMBALANCE in op.attrs else None,
        implementations=(
            Implemented("e", HELD_EXPERTS),
            *([] if STAYS in op.attrs else [_dispatched(operands[0])]),
            *([_traded(operands[0])] if reads == "halves" and not bias else []),
        ),
        flop_terms=(
            (2.0 * apart, ("n", "k", "d", *between)),
            (2.0, ("n", "k", "f", "d")),
        ),
        products=(0, 3),
        sides=((("n", "k"), ("e",)), (between, ()), (("d",), ())),
        cost="matmul",
    )


def _dispatched(x: Tensor) -> Implemented:
    return Implemented("n", DISPATCH, _routed(x), ("e",))


def _routed(x: Tensor) -> tuple[Internal, ...]:
    """Every route of an even share of tokens goes to its expert and comes back, in both ways; how
    many go to each expert ahead of them."""
    there: list[Literal["forward", "backward"]] = ["forward", "forward", "backward", "backward"]
    counts = Internal("all_to_all", "forward", ("e",), 1, "int64", ahead=True)
    return (counts, *(Internal("all_to_all", way, ("n", "k", "d"), 1, x.dtype) for way in there))


def _traded(x: Tensor) -> Implemented:
    """Both halves of the first matrix by contiguous columns: each of a rank's two pieces goes to
    the rank that multiplies with it."""
    moves = tuple(Internal("all_to_all", way, ("n", "k", "f"), 2, x.dtype) for way in _WAYS)
    return Implemented("f", TRADED_HALVES, moves, ("g",), sums=True)


def _kept(op: Op, operands: tuple[Tensor, ...], between: tuple[str, ...]) -> tuple[Kept, ...]:
    """Of every route: its token, what its expert makes of it, and its places in both orders."""
    first, steps = _kept_by_gate(op, operands[0])
    apart = op.attrs["reads"] == "apart"
    size = DTYPE_BYTES[operands[0].dtype]
    return (
        Kept(("n", "k", "d"), size),
        *([Kept(("n", "k", *between), size)] * (2 if apart else 1) if first else []),
        Kept(("n", "k", "f"), size * steps),
        Kept(("n", "k", "d"), size, home=True),  # before it is weighted
        Kept(("n", "k"), DTYPE_BYTES[operands[2].dtype] + 3 * INTEGER, home=True),
    )


def _kept_by_gate(op: Op, x: Tensor) -> tuple[bool, int]:
    """Whether what the first product gives is kept, and how many results of the gate's steps."""
    given = 1 if op.attrs["reads"] == "all" else 2
    kept = kept_of_gate(op.attrs["gate"], given, x)
    return any(i < given for i in kept), sum(i >= given for i in kept)


EXPERTS: Mapping[str, Rule | RuleMaker] = {"experts": _experts}
