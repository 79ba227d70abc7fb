"""One parameter as a rank holds it: what the optimizer updates, and of which whole."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from autopar.runtime.pytorch.expert_places import Order, runs
from autopar.runtime.pytorch.parameters import Declared, Region


@dataclass(slots=True)
class Held:
    """One parameter as this rank holds it.

    leaf:   plain tensor of the piece; what the optimizer updates. Shares memory with the module's.
    region: which piece of the global tensor it is, over all axes; where experts are placed, by
            place.
    split:  the mesh axes that cut it; over all others it is replicated.
    reduce: axes over which its gradient is still a partial sum when backward ends.
    counted: whether it counts in norms; of a parameter that several stages hold, one does.
    order:  the expert at each place of the first dim; None: in their order.
    """

    name: str
    declared: Declared
    leaf: nn.Parameter
    region: Region
    split: tuple[str, ...]
    reduce: tuple[str, ...]
    counted: bool = True
    order: Order = None

    def parts(self, like: Tensor) -> list[tuple[Region, Tensor]]:
        """What of the model's tensor a tensor ``like`` the piece is: regions, and views of it."""
        if self.order is None:  # a scalar has no rows
            return [(self.region, like)]
        return [(region, like[rows]) for rows, region in runs(self.region, self.order)]
