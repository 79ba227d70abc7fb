"""How many units ahead FSDP2 gathers parameters (`autopar.nouns.prefetch`).

By itself FSDP2 gathers for backward what ran before in the order of forwards since the last
backward. In a pipeline these are of several microbatches, so that a first unit would be followed by
the last one of the microbatch before: there units are told what to gather.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.distributed.fsdp import FSDPModule

from autopar.torch_private.distributed import fsdp_gathers_in_line


def gather_ahead(
    groups: Sequence[FSDPModule], ahead: int, forward_only: Collection[FSDPModule] = ()
) -> None:
    """``groups``: the units in the order of their calls, and then the root, which is gathered first
    and whole from its forward to the end of its backward; ``forward_only``: those of them that no
    gradient passes."""
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
    gather_back(groups, ahead, forward_only)


def gather_back(
    groups: Sequence[FSDPModule], ahead: int, forward_only: Collection[FSDPModule] = ()
) -> None:
    """For backward alone, what `gather_ahead` is given."""
    *units, root = groups
    passed = [unit for unit in units if unit not in forward_only]
    root.set_modules_to_backward_prefetch(passed[-1:] or [root])
    for place, unit in enumerate(passed):
        before = passed[max(0, place - ahead) : place]
        unit.set_modules_to_backward_prefetch(before[::-1] or [unit])
