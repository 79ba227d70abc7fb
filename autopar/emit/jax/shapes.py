"""What a function says of its arguments and results: types, and the shapes on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.emit.jax.errors import UnevenPieces
from autopar.emit.text import Lines
from autopar.lowering.lowered import BATCH_AXES, Lowered
from autopar.nouns.graph import Tensor
from autopar.nouns.sharding import Sharding


def signature(
    name: str, arguments: Sequence[str], results: int, carries: int | None = None
) -> list[str]:
    """The lines of a ``def`` with typed ``arguments``; ``carries``: see `Printing`."""
    lines = Lines(0)
    made = "Array" if results == 1 else f"tuple[{', '.join(['Array'] * results)}]"
    if carries is not None:
        parts = (["Array"] * n for n in (carries, results - carries))
        made = f"tuple[{', '.join(_type_of(part) for part in parts)}]"
    lines.add(f"def {name}({', '.join(arguments)}) -> {made}:")
    return lines.lines


def grouped(texts: Sequence[str], carries: int | None) -> str:
    """What a step gives: ``(h, c), y``, without brackets where one stands for a tuple of one;
    ``carries``: see `Printing`."""
    if carries is None:
        return ", ".join(texts)
    return f"{tuple_of(texts[:carries])}, {tuple_of(texts[carries:])}"


def tuple_of(texts: Sequence[str]) -> str:
    """A group of arrays as a scan has it: one of one array is that array."""
    if len(texts) == 1:
        return texts[0]
    return f"({', '.join(texts)})" if texts else "()"


def step_arguments(
    variables: Sequence[str], carries: int, rows: int
) -> tuple[list[str], list[str]]:
    """(typed arguments, first lines) of a step of a scan, whose inputs are ``variables``."""
    fixed = len(variables) - carries - rows
    typed, lines = [f"{v}: Array" for v in variables[:fixed]], []
    for name, some in (
        ("carry", variables[fixed:][:carries]),
        ("row", variables[fixed + carries :]),
    ):
        if len(some) == 1:
            typed.append(f"{some[0]}: Array")
            continue
        typed.append(f"{name}: {_type_of(['Array'] * len(some)) if some else 'object'}")
        lines += [f"    {', '.join(some)} = {name}"] if some else []
    return typed, lines


STEP = frozenset(("carry", "row"))
"""Names of arguments of steps that stand for several arrays, or none."""


def _type_of(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    return f"tuple[{', '.join(parts) or '()'}]"


def shown(tensor: Tensor, sharding: Sharding, lowered: Lowered) -> str:
    """Local shape and model axes: ``[8, 64, 128] tp:S1``."""
    local = list(sharding.local_shape(tensor.shape, lowered.mesh))
    model = " ".join(
        f"{a}:{p}" for a, p in sharding.placements if a not in BATCH_AXES and p.kind in "SP"
    )
    return f"{local} {model}".strip()


def check_even(tensor: Tensor, sharding: Sharding, lowered: Lowered) -> None:
    """Raises `UnevenPieces` where a dim does not divide by the axes that split it."""
    for dim, size in enumerate(tensor.shape):
        axes = sharding.split_axes(dim)
        ways = math.prod(lowered.mesh.size(a) for a in axes)
        if size % ways:
            raise UnevenPieces(
                f"{tensor.name} has dim {dim} of {size}, which {' x '.join(axes)} = {ways} does "
                "not divide, and JAX cuts arrays evenly: change the size (a vocabulary can be "
                "rounded up)",
                {axes[-1]: "1"},
            )
