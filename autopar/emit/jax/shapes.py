"""What a function says of its arguments and results: types, and the shapes on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.emit.jax.errors import UnevenPieces
from autopar.emit.text import Lines
from autopar.lowering.lowered import BATCH_AXES, Lowered
from autopar.nouns.graph import Tensor
from autopar.nouns.sharding import Sharding


def signature(name: str, arguments: Sequence[str], results: int) -> list[str]:
    """The lines of a ``def`` with typed ``arguments``."""
    lines = Lines(0)
    made = "Array" if results == 1 else f"tuple[{', '.join(['Array'] * results)}]"
    lines.add(f"def {name}({', '.join(arguments)}) -> {made}:")
    return lines.lines


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
