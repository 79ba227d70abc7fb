"""How the call of an op says by which implementations it runs (`autopar.rules.implementations`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.emit.text import axes_text, tuple_text
from autopar.lowering.lowered import LoweredOp
from autopar.nouns.axes import MICROBATCH
from autopar.nouns.errors import UserError
from autopar.rules.implementations.table import TABLE


class NoImplementation(UserError):
    """A plan runs an op in a way that programs of its framework have no call for."""


def arguments(
    op: LoweredOp, framework: str, whole: Callable[[int], Sequence[object]], order: str
) -> list[str]:
    """What the call is given beside the plain one's arguments; ``whole``: an operand's extents;
    ``order``: how pieces of sequences lie, which is said where they are not contiguous. What a
    layer keeps of earlier slices is its own, and has the name of the op.

    Raises `NoImplementation`.
    """
    given = []
    for name, axes in op.implementations.items():
        row = TABLE[name]
        takes = row.calls.get(framework)
        if takes is None or (takes and MICROBATCH in axes):
            raise NoImplementation(
                f"the plan runs {op.op.kind} at {op.op.source} by {name} over "
                f"{' and '.join(axes)} ({row.runs}), which the {framework} backend does not do",
                {axis: "1" for axis in axes if axis != MICROBATCH},
            )
        for argument in takes:
            if argument == "vocabulary":
                value = str(_extent(op, name, whole))
            elif argument == "earlier":
                value = f'(self, "{op.op.name.rpartition("/")[2]}")'
            elif argument == "order":
                if order == "contiguous":
                    continue
                value = f'"{order}"'
            else:
                value = tuple_text(axes) if argument == "axes" else axes_text(axes)
            given.append(f"{argument}={value}")
    return given


def _extent(op: LoweredOp, name: str, whole: Callable[[int], Sequence[object]]) -> object:
    """The whole extent of the factor that ``name`` splits, as the text has it."""
    assert op.bound is not None
    (factor,) = (each.factor for each in op.bound.rule.implementations if each.name == name)
    holders = ((i, op.bound.operand_holder(i, factor)) for i in range(len(op.bound.operands)))
    return next(whole(i)[dim] for i, dim in holders if dim is not None)
