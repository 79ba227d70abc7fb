"""In how many pieces tokens travel to their experts and back: what may be pinned.

The search takes for each op as many as its price says (`autopar.pricing.op_prices`); here a pin is
refused that cannot be, or that nothing would follow.
"""

from __future__ import annotations

from autopar.lowering.lowered import Lowered
from autopar.lowering.routed_pieces import LEAST_TOKENS, sites, takes, tokens_of
from autopar.nouns.layout import EXPERT_PIECES, LayoutError, Pins
from autopar.nouns.pieces import COUNTS

_INSTEAD = "leave it out, or pin ep=2 or more"


def check_expert_pins(pins: Pins, framework: str) -> None:
    """Raises `LayoutError` where programs of the framework have no pieces, or experts are on every
    rank."""
    pieces = pins.expert_pieces
    if pieces in (None, 1):
        return
    text = f"--fix {EXPERT_PIECES}={pieces}"
    if framework != "torch":
        raise LayoutError(f"{text}: JAX programs leave overlap to XLA; leave it out")
    if pins.ep == 1:
        raise LayoutError(f"{text}: under ep=1 every rank has all experts; {_INSTEAD}")


def check_expert_pieces(pins: Pins, lowered: Lowered) -> None:
    """Raises `LayoutError` where pinned pieces are cut nowhere, or cannot be where they would."""
    pieces = pins.expert_pieces
    if pieces is None or pieces == 1:
        return
    text = f"--fix {EXPERT_PIECES}={pieces}"
    every = [*sites(lowered)]
    if not every:
        raise LayoutError(
            f"{text} has no effect on this layout: no tokens travel to experts along one axis; "
            f"{_INSTEAD}"
        )
    for _, op, part in every:
        if not takes(op, part.mesh, pieces):
            tokens = tokens_of(op, part.mesh)
            fits = max(n for n in COUNTS if takes(op, part.mesh, n))
            most = f"the most that it takes is {fits}" if fits > 1 else "it takes no pieces"
            raise LayoutError(
                f"{text}: {op.op.name} at {op.op.source} has {tokens} tokens on a rank in a "
                f"microbatch; pieces are equal, of {LEAST_TOKENS} tokens at least; {most}"
            )
