"""Shared experts that run while tokens travel to the others: what may be pinned.

The search has them do so where its price says that it gains (`autopar.pricing.op_prices`); here a
pin is refused that nothing would follow.
"""

from __future__ import annotations

from autopar.lowering.lowered import Lowered
from autopar.lowering.routed_pieces import sites as routed_sites
from autopar.lowering.shared_experts import sites
from autopar.nouns.layout import BESIDE, SHARED_EXPERTS, LayoutError, Pins

_TEXT = f"--fix {SHARED_EXPERTS}={BESIDE}"
_INSTEAD = "leave it out, or pin ep=2 or more"


def check_shared_pin(pins: Pins, framework: str, style: str) -> None:
    """Raises `LayoutError` where programs of the framework or style leave the order to a compiler,
    or experts are on every rank."""
    if pins.shared_experts != BESIDE:
        return
    if framework != "torch":
        raise LayoutError(f"{_TEXT}: JAX programs leave overlap to XLA; leave it out")
    if style != "eager":
        raise LayoutError(
            f"{_TEXT}: what runs inside the call of routed experts is not compiled; leave it out, "
            "or say --style eager"
        )
    if pins.ep == 1:
        raise LayoutError(f"{_TEXT}: under ep=1 every rank has all experts; {_INSTEAD}")


def check_shared_experts(pins: Pins, lowered: Lowered) -> None:
    """Raises `LayoutError` where nothing runs while tokens travel, though that is pinned."""
    if pins.shared_experts != BESIDE or any(sites(lowered)):
        return
    why = f"no tokens travel to experts along one axis; {_INSTEAD}"
    if travelling := [op.op for _, op, _ in routed_sites(lowered)]:
        why = (
            f"nothing may run beside {travelling[0].name} at {travelling[0].source}: that is a "
            "module of several layers and one result, next to the experts, which reads nothing of "
            "theirs and draws no random numbers; leave it out"
        )
    raise LayoutError(f"{_TEXT} has no effect on this layout: {why}")
