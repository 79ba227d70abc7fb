"""The experts of a layer: every token goes through the few that its route names.

A token needs nobody else's, so any axis may split tokens; the matrices of all experts are then
whole there, with gradients that are partial sums. The width between the two products may be split
where that cuts the stored matrices into contiguous pieces: where no gate shares the first one, or
gate and gated values take turns in it. Then the result is a sum over the pieces, to which a bias
behind the second product would be added too often.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.graph import DTYPE_BYTES, Op, Tensor
from autopar.rules.notation import Kept, Rule, RuleMaker
from autopar.rules.terms import text


def _experts(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Work and memory are those of the routes, n tokens times k experts each."""
    del results
    reads, bias = op.attrs["reads"], op.attrs["bias"]
    sliced = reads != "halves" and not bias
    inner = "f+" if sliced else "f!"
    wide = {"all": inner, "pairs": f"({inner} p=2!)" if sliced else "g!", "halves": "g!"}[reads]
    up, down = ["e!", wide, "d!"], ["e!", "d!", inner]
    if op.attrs["transposed"]:
        up, down = ["e!", "d!", wide], ["e!", inner, "d!"]
    terms = [["n", "d!"], ["n", "k!"], ["n", "k!"], up, down]
    if bias:
        terms += [["e!", wide], ["e!", "d!"]]
    between = ("f", "p") if wide.startswith("(") else (wide.rstrip("!+"),)
    size, steps = DTYPE_BYTES[operands[0].dtype], len(op.attrs["gate"])
    return Rule(
        text(terms, [["n", "d!"]]),
        saves=(3, 4),
        keeps=(
            Kept(("n", "k", "d"), size),  # the tokens in order of their experts
            Kept(("n", "k", *between), size),
            Kept(("n", "k", "f"), size * steps),
            Kept(("n", "k", "d"), size),  # before it is weighted
            Kept(("n", "k"), 2 * 8 + DTYPE_BYTES[operands[2].dtype]),  # the order, there and back
        ),
        flop_terms=((2.0, ("n", "k", "d", *between)), (2.0, ("n", "k", "f", "d"))),
        products=(0, 3),
        sides=((("n", "k"), ("e",)), (between, ()), (("d",), ())),
        cost="matmul",
    )


EXPERTS: Mapping[str, Rule | RuleMaker] = {"experts": _experts}
