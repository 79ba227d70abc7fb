"""Matrix products. A factor that both operands have and the result lacks is summed over."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.graph import Op, Tensor
from autopar.rules.notation import Rule, RuleError, RuleMaker
from autopar.rules.terms import others_need, product, text


def _einsum(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """The equation is the rule already: letters that the result lacks are summed."""
    equation = str(op.attrs["equation"]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow:
        # Implicit results: letters that occur once, in alphabetical order (numpy's convention).
        used = left.replace(",", "").replace(".", "")
        right = ("..." if "..." in left else "") + "".join(
            sorted(c for c in set(used) if used.count(c) == 1)
        )

    def term(part: str) -> list[str]:
        dims = part.replace("...", ".")
        return [
            "..." if c == "." else f"i{c}" + ("" if c in right else "+") for c in dims if c != " "
        ]

    if "..." in left and "..." not in right:
        raise RuleError(f"einsum {equation!r} sums over ...; name the summed dims instead")
    return Rule(
        text([term(p) for p in left.split(",")], [term(right)]),
        saves=tuple(i for i in range(len(operands)) if others_need(operands, i)),
        flops=2.0 * max(len(operands) - 1, 1),
        cost="matmul" if len(operands) > 1 else "reduction",
    )


PRODUCTS: Mapping[str, Rule | RuleMaker] = {
    "linear": product(Rule("... k+, n~ k+ -> ... n~", saves=(0, 1), flops=2.0, cost="matmul")),
    "linear_t": product(Rule("... k+, k+ n~ -> ... n~", saves=(0, 1), flops=2.0, cost="matmul")),
    "matmul": product(
        Rule("... m k+, ... k+ n -> ... m n", saves=(0, 1), flops=2.0, cost="matmul")
    ),
    "einsum": _einsum,
    # Thin groups fill tiles less, and all matrices are read however few rows there are.
    "grouped_linear": Rule(
        "n k+, n, g! k+ m~ -> n m~",
        saves=(0, 1, 2),
        flop_terms=((2.0, ("n", "k", "m")),),
        products=(0, 2),
        sides=((("n",), ("g",)), (("m",), ()), (("k",), ())),
        cost="matmul",
    ),
}
