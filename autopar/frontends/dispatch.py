"""The frontend that a workload's callables ask for."""

from __future__ import annotations

from autopar.frontends.shared.captured import Captured
from autopar.nouns.workload import Workload
from autopar.rules.trial import Execute


def capture(workload: Workload) -> Captured:
    """The captured model of ``workload``; imports torch or jax. Raises `UserError`."""
    if workload.framework == "jax":
        from autopar.frontends.jax.capture import capture_workload

        return capture_workload(workload)
    from autopar.frontends.pytorch import capture as capture_module

    return capture_module(workload)


def executor(framework: str) -> Execute:
    """What runs one op of a captured graph; imports torch or jax."""
    if framework == "jax":
        from autopar.frontends.jax import execute as by_jax

        return by_jax.execute
    from autopar.frontends.pytorch import execute as by_torch

    return by_torch.execute
