"""The frontend that a workload's callables ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.frontends.captured import Captured
from autopar.nouns.graph import Op, Tensor
from autopar.rules.trial import Array, Execute, Ran
from autopar.workload import Workload


def capture(workload: Workload) -> Captured:
    """The captured model of ``workload``; imports torch or jax. Raises `UserError`."""
    if workload.framework == "jax":
        from autopar.frontends.jax.capture import capture_workload

        return capture_workload(workload)
    from autopar.frontends.pytorch import capture as capture_module

    return capture_module(workload)


def executor(framework: str) -> Execute:
    """What runs one op of a captured graph; torch or jax is imported when it first does."""

    def execute(
        op: Op,
        tensors: Mapping[str, Tensor],
        operands: Sequence[Array],
        cotangents: Sequence[Array | None],
        wide: bool,
    ) -> Ran:
        run = _by_jax() if framework == "jax" else _by_torch()
        return run(op, tensors, operands, cotangents, wide)

    return execute


def _by_jax() -> Execute:
    from autopar.frontends.jax.execute import execute

    return execute


def _by_torch() -> Execute:
    from autopar.frontends.pytorch.execute import execute

    return execute
