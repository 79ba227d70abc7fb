"""Dynamic loss scaling in float16, whose least number is 6e-8: the rule of `torch.amp.GradScaler`.

Shares of the loss are multiplied before backward, gradients divided behind it. Where a gradient of
any rank is not finite, the step is left out on all of them and the scale halved; it doubles after
so many steps in a row that were taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.storage import Held
from autopar.runtime.settings import FIRST_LOSS_SCALE, LOSS_SCALE_GROWS_EVERY


@dataclass(slots=True)
class LossScale:
    """``scale`` now; it grows after ``every`` steps, 0: it stays as it is. ``taken``: steps since
    it changed."""

    scale: float = FIRST_LOSS_SCALE
    every: int = LOSS_SCALE_GROWS_EVERY
    taken: int = 0

    def overflowed(self, held: Iterable[Held], ranks: Ranks) -> bool:
        """Whether some gradient of some rank is not finite: one all-reduce of a number over all
        ranks."""
        grads = [h.leaf.grad for h in held if h.leaf.grad is not None]
        finite = [grad.isfinite().all() for grad in grads]
        flag = torch.zeros((), device=ranks.device)
        if finite:
            flag += ~torch.stack(finite).all()
        group = ranks.group(*ranks.mesh.axes)
        if group is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag)

    def stepped(self, taken: bool) -> None:
        """After a step, ``taken`` or left out."""
        if not self.every:
            return
        self.taken = self.taken + 1 if taken else 0
        if not taken:
            self.scale /= 2
        elif self.taken == self.every:
            self.scale, self.taken = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.taken = float(state["scale"]), int(state["taken"])
