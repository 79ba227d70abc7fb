"""Parameters under DistributedDataParallel, which adds up gradients in the last microbatch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autopar.lowering.state import split_of
from autopar.runtime.pytorch.bucket_sums import BucketSums
from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.storage import Storage
from autopar.runtime.pytorch.two_level import TwoLevelSum
from autopar.torch_private.distributed import ddp_ignores


class Replicated(Storage):
    """DistributedDataParallel over the data axes; gradients are reduced in the last microbatch."""

    def _wrap(self) -> None:
        super()._wrap()
        axes = self.ranks.batch_axes
        self._ddp: DistributedDataParallel | None = None
        named = dict(self.model.named_parameters())
        apart = [name for name in named if split_of(self.declared[name].sharding)]
        if not any(p.requires_grad for name, p in named.items() if name not in apart):
            return  # DDP wants a gradient to reduce
        ddp_ignores(self.model, apart)
        if not self.settings.two_level:
            # DDP divides by the number of ranks; the gradient wanted is the sum.
            self.grad_scale = float(self.ranks.size(*axes))
        scale = self.grad_scale
        named = dict(self.model.named_parameters())
        for name in apart:
            if named[name].requires_grad:
                named[name].register_hook(lambda gradient: gradient / scale)  # type: ignore[no-untyped-call]
        self._ddp = DistributedDataParallel(
            self.model,
            process_group=self.ranks.group(*axes),
            forward_sync_buffers=False,
            init_sync=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.settings.bucket_mib,
        )
        self.call = self._ddp
        if self.settings.two_level:
            self._on_two_levels(self._ddp, [p for n, p in named.items() if n not in apart])

    def _on_two_levels(self, ddp: DistributedDataParallel, reduced: list[nn.Parameter]) -> None:
        """Of `reduced`, sums in place of means come out of backward."""
        groups = self.ranks.two_level_groups(self.ranks.batch_axes, self.settings.two_level)
        whole_bytes = sum(p.nbytes for p in reduced if p.requires_grad)
        BucketSums(TwoLevelSum(groups, whole_bytes)).register(ddp)

    def _hold(self, name: str, parameter: nn.Parameter) -> Held:
        held = super()._hold(name, parameter)
        if split_of(held.declared.sharding):
            held.reduce = self.reduced_over(held.declared)
        return held

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()
