"""What a rank did in a step, for comparison with the plan."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.pipeline.actions import Action


@dataclass(frozen=True, slots=True)
class Sent:
    """A tensor sent to another rank of the pipeline: a value, or (``gradient``) that of one."""

    value: str
    gradient: bool
    microbatch: int
    target: int
    size_bytes: int

    def __str__(self) -> str:
        mark = "d" if self.gradient else ""
        return f"{mark}{self.value}:{self.microbatch}>{self.target} {self.size_bytes} B"


@dataclass(frozen=True, slots=True)
class Played:
    """An action, what it sent, and when it began and ended (`time.perf_counter`, seconds; on a GPU
    that is when it was issued)."""

    action: Action
    sent: tuple[Sent, ...]
    start_s: float
    end_s: float

    def __str__(self) -> str:
        return " ".join([str(self.action), *(f"[{s}]" for s in self.sent)])
