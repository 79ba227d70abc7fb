"""Operands of one forward's statements: what each is read as, and pieces that several want."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from autopar.emit.pytorch.values import Surroundings, Values, bound
from autopar.emit.text import Expr, variable
from autopar.lowering.lowered import LoweredOp, Operand
from autopar.rules.resharding import Step

Cut = tuple[str, tuple[Step, ...]]
"""A tensor, and the steps that take a piece of it."""


class Operands(Values):
    """cuts: the variable of each piece that others want too; ``wanted_cuts``: how many still do."""

    def __init__(
        self, around: Surroundings, uses: Mapping[str, int], ops: Iterable[LoweredOp]
    ) -> None:
        """``ops``: those whose operands are read here, but for calls of blocks."""
        super().__init__(around, uses)
        self.cuts: dict[Cut, str] = {}
        self.wanted_cuts = Counter(
            (o.name, o.steps) for op in ops for o in op.operands if o.steps and _moves_nothing(o)
        )

    def operand(self, operand: Operand) -> Expr:
        """The expression of an operand; its steps are printed, or found printed before."""
        token = self.token()
        cut = (operand.name, operand.steps)
        if cut in self.cuts:
            self.variables.hold((self.cuts[cut],), token)
            if operand.name in self.uses:  # else a buffer, which every reader reads anew
                self.read(operand.name)
            self._keep_cut(operand, self.cuts[cut])
            return variable(self.cuts[cut])
        expr = self.source(operand.name, token)
        if operand.steps:
            expr = self.steps(
                expr, operand.name, operand.steps, self.tensor(operand.name).shared, token
            )
            self._keep_cut(operand, expr.text)
        return expr

    def _keep_cut(self, operand: Operand, var: str) -> None:
        """A piece without a gradient is cut once for all who want the same."""
        cut = (operand.name, operand.steps)
        self.wanted_cuts[cut] = self.wanted_cuts.get(cut, 0) - 1
        if self.wanted_cuts[cut] > 0:
            self.cuts[cut] = var
            self.variables.hold((var,), f"cut {cut}")
        elif cut in self.cuts:
            self.variables.release(f"cut {cut}")

    def seen(self, operand: Operand) -> Expr:
        """What an operand would read as, nothing printed."""
        name = operand.name
        if name in self.pending:
            return self.pending[name]
        if name in self.bound:
            return bound(self.bound[name])
        text = self.around.attribute(name)
        return Expr(text if self.tensor(name).tensor.role == "buffer" else f"local({text})")


def _moves_nothing(operand: Operand) -> bool:
    """Whether the steps before an operand take pieces of it, forward and backward for free."""
    return not operand.differentiable and all(
        step.source.kind in "RD" and step.target.kind == "S" for step in operand.steps
    )
