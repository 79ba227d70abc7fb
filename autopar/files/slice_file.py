"""Cluster files that name slices of TPUs in the place of groups and levels.

name: two slices of 16 v5e
slice: v5e-4x4
slices: 2
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autopar.cost_models.catalogue import find_device
from autopar.cost_models.slices import UnknownSlice, find_slice
from autopar.files.file_errors import sentences
from autopar.nouns.cluster import Cluster, DeviceGroup

MOST_SLICES = 1024
"""More than any job has had; the degrees of more devices would take long to list."""


class SliceFileError(ValueError):
    """A slice that cannot be had; the message says what can."""


class _SliceText(BaseModel):
    """``slices`` of them, joined by the data-centre network."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    slice: str
    slices: int = Field(default=1, gt=0, le=MOST_SLICES)


def cluster_of_slice(data: dict[str, Any], default_name: str) -> Cluster:
    """The cluster of a file that has `slice:`. Raises `SliceFileError`."""
    beside = [key for key in ("groups", "levels", "devices") if key in data]
    if beside:
        raise SliceFileError(
            f"slice: gives devices and links, and so does {beside[0]}:; keep one of them"
        )
    try:
        parsed = _SliceText.model_validate(data)
    except ValidationError as error:
        raise SliceFileError("; ".join(sentences(error, _SliceText, {}))) from None
    try:
        made = find_slice(parsed.slice)
    except UnknownSlice as error:
        raise SliceFileError(f"slice: {error}") from None
    group = DeviceGroup(find_device(made.generation.device), made.device_count * parsed.slices)
    return Cluster(parsed.name or default_name, (group,), made.levels(parsed.slices))
