"""What the emitter asks of a captured model beside its graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from autopar.nouns.batch import BatchEntry


class CapturedTensor(Protocol):
    """What the emitter asks of a tensor of the original model."""

    @property
    def name(self) -> str: ...
    @property
    def persistent(self) -> bool: ...
    @property
    def shared_with(self) -> tuple[str, ...]: ...
    @property
    def limits(self) -> tuple[float | None, float | None] | None: ...


class CapturedModel(Protocol):
    """What the frontend knows of the model beside its graph."""

    @property
    def tensors(self) -> Mapping[str, CapturedTensor]: ...
    @property
    def batch(self) -> tuple[BatchEntry, ...]: ...
    @property
    def samples(self) -> int: ...
