"""A loss that is no number any more, in either framework."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload


class Diverged(UserError):
    """Training has left the numbers; what was saved before is untouched."""


def check_loss(losses: Sequence[float], step: int, workload: Workload) -> None:
    """Raises `Diverged` where the last of ``losses``, that of ``step``, is not finite."""
    if not losses or math.isfinite(losses[-1]):
        return
    before = f" after {losses[-2]:.6g} in step {step - 1}" if len(losses) > 1 else ""
    ways = [f"a learning_rate below {workload.learning_rate:g}"] if len(losses) > 1 else []
    if workload.clip_norm is None:
        ways.append("clip_norm=1.0")
    if workload.precision == "float16":
        ways.append("precision='bfloat16'")
    ways.append("looking for a division by zero or a log of 0 in the model and its batch")
    raise Diverged(
        f"the loss of step {step} is {losses[-1]}{before}; training stops and nothing more is "
        f"saved. Try {', or '.join(ways)}"
    )
