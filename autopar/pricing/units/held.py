"""What the stages of a pipeline hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Of one stage of a pipeline. ``saved``: what it keeps of each microbatch for backward;
    ``pending``: of one of which the gradients of weights alone are left to make; ``passing``: what
    one pass makes on top and frees again; ``casts``: copies of parameters; ``host``: optimizer
    state in host memory; ``chunks``: what of it a step has on the device at most, of all stages of
    a rank together."""

    parameters: int
    gradients: int
    optimizer: int
    host: int
    saved: int
    pending: int
    passing: int
    casts: int
    gathered: int
    packages: frozenset[str]
    chunks: int = 0
