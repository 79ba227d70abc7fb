"""How many units ahead FSDP2 gathers parameters (`autopar.nouns.prefetch`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule

from autopar.torch_private.distributed import fsdp_gathers_in_line


def gather_ahead(groups: Sequence[FSDPModule], ahead: int) -> None:
    """``groups``: the units in the order of their calls, and then the root, which is gathered first
    and whole from its forward to the end of its backward."""
    *units, root = groups
    if not ahead:
        for unit in groups:
            fsdp_gathers_in_line(unit)
            # An empty list is FSDP2's own way. One that is whole itself is not gathered again.
            unit.set_modules_to_backward_prefetch([unit])
        return
    root.set_modules_to_forward_prefetch(units[:ahead])
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + ahead])
        before = units[max(0, place - ahead) : place]
        unit.set_modules_to_backward_prefetch(before[::-1] or [unit])
