"""The frontend that a workload's callables ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from autopar.nouns.graph import Graph
from autopar.workload import Workload


class ModelTensor(Protocol):
    """A parameter or buffer of the model under its full name."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def trainable(self) -> bool: ...
    @property
    def persistent(self) -> bool: ...
    @property
    def used(self) -> bool: ...
    @property
    def shared_with(self) -> tuple[str, ...]: ...


class BatchEntry(Protocol):
    """One tensor of the global batch; ``batch_dim`` is None where every device gets it whole."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def batch_dim(self) -> int | None: ...


class Captured(Protocol):
    """What a frontend gives: the graph, and what the graph leaves out."""

    @property
    def graph(self) -> Graph: ...
    @property
    def tensors(self) -> Mapping[str, ModelTensor]: ...
    @property
    def batch(self) -> tuple[BatchEntry, ...]: ...
    @property
    def samples(self) -> int: ...
    @property
    def tokens(self) -> int | None: ...
    def fingerprint(self) -> str: ...


def capture(workload: Workload) -> Captured:
    """The captured model of ``workload``; imports torch or jax. Raises `UserError`."""
    if workload.framework == "jax":
        from autopar.frontends.jax.capture import capture_workload

        return capture_workload(workload)
    from autopar.frontends.pytorch import capture as capture_module

    return capture_module(workload)
