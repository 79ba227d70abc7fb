"""Whether the experts of a class compute what one op of the graph says: tried on drawn numbers.

A class of the library promises by its decorator that its own forward, a loop over experts, is two
products with a gate between them, weighted and added. Whoever writes one may scale or norm besides.
So its own forward runs once on small matrices, and so does what the graph will say of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TOKENS, HIDDEN, INNER = 6, 4, 6
TOLERANCE = 1e-4
"""Relative; a class may add up in float32 whatever it is given."""


def differs(module: Any, shapes: Mapping[str, torch.Size]) -> float | None:
    """By how much, relative to its norm; None where nothing can be said, since the class does not
    run on widths of our own.

    ``shapes``: of its parameters by name, matrices before biases. The class's own forward must be
    what a call of ``module`` runs.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    first, _, *biases = shapes
    count = shapes[first][0]
    wide = INNER * (1 + bool(module.has_gate))
    up, down = draw(count, wide, HIDDEN), draw(count, HIDDEN, INNER)
    added = [draw(count, wide), draw(count, HIDDEN)] if biases else [None, None]
    turned = [m.transpose(1, 2).contiguous() if module.is_transposed else m for m in (up, down)]
    held = dict(zip(shapes, [*turned, *(b for b in added if b is not None)], strict=True))
    x, weights = draw(TOKENS, HIDDEN), torch.rand(TOKENS, 2, generator=generator)
    index = torch.randint(0, count, (TOKENS, 2), generator=generator)
    try:
        with torch.no_grad():
            own = torch.func.functional_call(module, held, (x, index, weights))
            each = [
                _one(module, x, up[e], down[e], *(None if b is None else b[e] for b in added))
                for e in index.unbind(1)
            ]
            wanted = torch.einsum("nkd,nk->nd", torch.stack(each, 1), weights)
    except Exception:  # a user's or the library's own code on widths that it was not made for
        return None
    return float((own - wanted).norm() / wanted.norm())


def _one(
    module: Any,
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    """Every token [n, i] through an expert of its own, matrices [n, o, i]."""
    h = torch.einsum("ni,noi->no", x, up)
    h = h if up_bias is None else h + up_bias
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    made = torch.einsum("ni,noi->no", h, down)
    return made if down_bias is None else made + down_bias
