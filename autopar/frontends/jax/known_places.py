"""What is known of a draft's values whose every element follows from its place: positions, masks.

The formulas and how ops change them are those of both frameworks (`frontends/shared/facts.py`,
`indices.py`); here they are found as they are asked for.
"""

from __future__ import annotations

from autopar.frontends.jax.draft import Builder, Node, Operand, Uniform, Value
from autopar.frontends.shared.facts import Choice, Fact, Test, affine
from autopar.frontends.shared.index_shapes import Made
from autopar.frontends.shared.indices import fact_of

_STREAM = ("add", "sub", "mul", "div")
"""What floats are computed by: of those only choices between numbers have a formula."""


class Places:
    """The facts of values, each found once."""

    def __init__(self) -> None:
        self._known: dict[Value, Fact | None] = {}

    def fact(self, x: Operand, builder: Builder) -> Fact | None:
        """None where there is none, or none that is short."""
        if isinstance(x, Uniform):
            return _of_number(x)
        if x not in self._known:
            node = builder.maker.get(x)
            self._known[x] = None if node is None else self._made(node, builder)
        return self._known[x]

    def _made(self, node: Node, builder: Builder) -> Fact | None:
        out = node.out
        if len(node.outputs) != 1 or ("float" in out.dtype and node.kind in _STREAM):
            return None
        given: list[Fact | None] = []
        for x in node.inputs:
            given.append(self.fact(x, builder))
            if given[-1] is None:
                return None
        return fact_of(node.kind, Made(out.shape, out.dtype, node.attrs), given)


def _of_number(x: Uniform) -> Fact:
    if isinstance(x.value, bool):
        return Test(x.shape, frozenset(), not x.value)
    if isinstance(x.value, int):
        return affine(x.shape, (0,) * len(x.shape), x.value)
    return Choice(Test(x.shape, frozenset()), x.value, x.value)
