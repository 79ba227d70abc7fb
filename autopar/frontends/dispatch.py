"""The frontend that a workload's callables ask for."""

from __future__ import annotations

from autopar.frontends.captured import Captured
from autopar.workload import Workload


def capture(workload: Workload) -> Captured:
    """The captured model of ``workload``; imports torch or jax. Raises `UserError`."""
    if workload.framework == "jax":
        from autopar.frontends.jax.capture import capture_workload

        return capture_workload(workload)
    from autopar.frontends.pytorch import capture as capture_module

    return capture_module(workload)
