"""What the cost model says of a plan: its time, and the memory of its fullest device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Memory:
    """Predicted peak on the fullest device, bytes. ``limit`` is what that device offers.

    buffers:  parameters gathered, gradients on their way, workspaces.
    reserved: freed, but kept by the allocator.
    outside:  what the process and its libraries hold beside the allocator.

    host: what is offloaded into the memory of a host for one device, where that takes most of
          ``host_limit``, what the host offers to the device.
    """

    total: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    limit: int
    reserved: int = 0
    outside: int = 0
    host: int = 0
    host_limit: int = 0

    @property
    def allocated(self) -> int:
        """What tensors hold."""
        return self.total - self.reserved - self.outside

    def parts(self) -> dict[str, int]:
        """What adds up to the total."""
        names = ("parameters", "gradients", "optimizer", "activations", "buffers")
        return {name: getattr(self, name) for name in (*names, "reserved", "outside")}

    @property
    def filled(self) -> float:
        """Share of the limit, or of the host's where that is fuller."""
        return max(self.total / self.limit, self.host / self.host_limit if self.host else 0.0)

    @property
    def fits(self) -> bool:
        return self.total <= self.limit and self.host <= self.host_limit


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the cost model says of the plan. ``lower_bound_s`` bounds every plan in the space.

    The bands are (least, most), as wide as the cost model's errors on published runs.
    """

    step_time_s: float
    lower_bound_s: float
    compute_time_s: float
    exposed_communication_s: float
    """What compute does not hide."""
    tokens_per_s: float | None
    mfu: float
    memory_bytes: Memory
    time_band_s: tuple[float, float]
    memory_band_bytes: tuple[int, int]
    forward_time_s: float = 0.0
    optimizer_time_s: float = 0.0
    waiting_time_s: float = 0.0
    """Of ranks for the slowest, where they meet."""
    placing_saves_s: float = 0.0
    """Of a step with experts in their order, where the plan places them by their rows."""

    @property
    def backward_time_s(self) -> float:
        """Backward passes with all that moves gradients."""
        return self.step_time_s - self.forward_time_s - self.optimizer_time_s
