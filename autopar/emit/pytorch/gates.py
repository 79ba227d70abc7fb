"""What stands between two products as a Python function (`autopar.rules.gates`)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.emit.pytorch.elementwise import PRINTERS as ELEMENTWISE
from autopar.emit.pytorch.site import EmitError, Site
from autopar.emit.text import Expr, Lines, variable
from autopar.rules.gates import Step


def gate_function(site: Site, names: Sequence[str], steps: Sequence[Step], about: str) -> str:
    """The function without ``def`` and its name; steps that are read twice are statements.

    names: of its arguments, what the first products give.
    """
    values = [variable(name) for name in names]
    reads = Counter(i for _, operands, _ in steps for i in operands)
    lines = Lines(4)
    lines.add(f'"""{about}"""')
    for number, (kind, operands, attrs) in enumerate(steps, len(names)):
        expr = _step(site, kind, [values[i] for i in operands], attrs)
        if reads[number] > 1:
            later = {i for _, given, _ in steps[number - len(names) + 1 :] for i in given}
            waiting = [values[i].text for i in later if len(names) <= i < number and reads[i] == 1]
            free = [
                values[i].text
                for i in operands
                if i < len(names)
                and i not in later
                and not any(re.search(rf"\b{names[i]}\b", text) for text in waiting)
            ]
            name = free[0] if free else f"h{number}"
            lines.add(f"{name} = {expr.text}")
            expr = variable(name)
        values.append(expr)
    lines.add(f"return {values[-1].text}")
    arguments = ", ".join(f"{name}: Tensor" for name in names)
    return "\n".join([f"({arguments}) -> Tensor:", *lines.lines])


def _step(site: Site, kind: str, operands: list[Expr], attrs: Mapping[str, object]) -> Expr:
    printer = ELEMENTWISE.get(kind)
    if printer is None:
        raise EmitError(f"{site.at.op.name}: no printer for {kind!r} between its products")
    op = replace(site.at.op, kind=kind, attrs=attrs)
    return printer(replace(site, at=replace(site.at, op=op), args=tuple(operands)))
