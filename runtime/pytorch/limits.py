"""Parameters that the model's forward keeps between limits, brought there ahead of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.runtime.pytorch.held import Held


@torch.no_grad()
def bring_within(
    pieces: Iterable[Held], limits: Iterable[tuple[str, float | None, float | None]]
) -> None:
    """Every rank its own pieces; ``limits``: parameter, lowest and highest value."""
    by_name = {name: between for name, *between in limits}
    for held in pieces if by_name else ():
        if held.name in by_name:
            held.leaf.clamp_(*by_name[held.name])
