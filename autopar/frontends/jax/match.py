"""Finding a template in a draft: unification from the result backwards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from autopar.frontends.jax.draft import Draft, Node, Operand, Uniform, Value
from autopar.frontends.jax.simplify import COMMUTATIVE

Binding = dict[Value, Operand]
CLOSE = 1e-6  # relative: constants of a float32 program are rounded


class Matcher:
    """Matches one template against places of a draft whose makers are ``maker``."""

    def __init__(self, template: Draft, maker: Mapping[Value, Node]) -> None:
        self.template = template
        self.template_maker = template.makers()
        self.inputs = set(template.inputs)
        self.maker = maker

    def match(self, node: Node) -> Binding | None:
        """What the template's inputs stand for if its result is that of ``node``."""
        (result,) = self.template.outputs
        assert isinstance(result, Value)
        return self._node(self.template_maker[result], node, {})

    def _operand(self, wanted: Operand, actual: Operand, bound: Binding) -> Binding | None:
        if isinstance(wanted, Uniform):
            same = isinstance(actual, Uniform) and _close(wanted.value, actual.value)
            return bound if same else None
        if wanted in bound:
            return bound if bound[wanted] == actual else None
        if wanted in self.inputs:
            number = wanted.shape == () and isinstance(actual, Uniform)
            if number or (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype):
                return {**bound, wanted: actual}
            return None
        if isinstance(actual, Uniform) or actual not in self.maker:
            return None
        return self._node(self.template_maker[wanted], self.maker[actual], bound)

    def _node(self, wanted: Node, actual: Node, bound: Binding) -> Binding | None:
        if (
            wanted.kind != actual.kind
            or len(wanted.inputs) != len(actual.inputs)
            or wanted.out.shape != actual.out.shape
            or wanted.out.dtype != actual.out.dtype
            or not _same_attrs(wanted.attrs, actual.attrs)
        ):
            return None
        orders = [actual.inputs]
        if wanted.kind in COMMUTATIVE:
            orders.append(actual.inputs[::-1])
        for order in orders:
            result = self._operands(zip(wanted.inputs, order, strict=True), bound)
            if result is not None:
                return {**result, wanted.out: actual.out}
        return None

    def _operands(self, pairs: Iterable[tuple[Operand, Operand]], bound: Binding) -> Binding | None:
        for wanted, actual in pairs:
            result = self._operand(wanted, actual, bound)
            if result is None:
                return None
            bound = result
        return bound


def _close(a: float, b: float) -> bool:
    return a == b or (not isinstance(a, bool) and math.isclose(a, b, rel_tol=CLOSE))


def _same_attrs(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    if a.keys() != b.keys():
        return False
    return all(
        _close(a[k], b[k]) if isinstance(a[k], int | float) and isinstance(b[k], int | float)
        else a[k] == b[k]
        for k in a
    )  # fmt: skip
