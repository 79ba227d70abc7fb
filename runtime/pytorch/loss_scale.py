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

from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.shared.settings import FIRST_LOSS_SCALE, LOSS_SCALE_GROWS_EVERY, Settings
from autopar.torch_private.ops import scale_all


@dataclass(slots=True)
class LossScale:
    """``scale`` now; it grows after ``every`` steps, 0: it stays as it is. ``taken``: steps since
    it changed; ``skipped``: whether the last one was left out."""

    scale: float = FIRST_LOSS_SCALE
    every: int = LOSS_SCALE_GROWS_EVERY
    taken: int = 0
    skipped: bool = False

    @staticmethod
    def of(settings: Settings) -> LossScale:
        """That of a program: in other precisions than float16 shares count once."""
        return LossScale() if settings.precision == "float16" else LossScale(1.0, every=0)

    def undo(self, held: Iterable[Held]) -> None:
        """Divides the gradients by what shares of the loss were multiplied with."""
        if self.scale != 1.0:
            grads = [h.leaf.grad for h in held if h.leaf.grad is not None]
            scale_all(grads, 1 / self.scale)

    def skips(self, held: Iterable[Held], ranks: Ranks) -> bool:
        """Whether this step is left out: some gradient of some rank is not finite, which one
        all-reduce of a number over all ranks tells. Sets the scale of the next step."""
        grads = [h.leaf.grad for h in held if h.leaf.grad is not None]
        finite = [grad.isfinite().all() for grad in grads]
        flag = torch.zeros((), device=ranks.device)
        if finite:
            flag += ~torch.stack(finite).all()
        group = ranks.group(*ranks.mesh.axes)
        if group is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        self.skipped = bool(flag)
        self._stepped(not self.skipped)
        return self.skipped

    def _stepped(self, taken: bool) -> None:
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
