"""What the settings of a run say of its layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopar.nouns.errors import UserError
from autopar.nouns.layout import Pins
from autopar.nouns.zero import ZERO_LEVELS


class NotImported(UserError):
    """Settings that cannot be read as a layout: which, and what to do."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One layout.

    pins:           degrees of 1 are left open, and so is ``dp_shard`` where it is what the devices
                    leave.
    global_batch:   samples of one step, None where the settings do not say.
    batch_per_rank: samples of one step on one data rank, where that is what they say.
    precision:      bf16, fp16, fp32; None where they do not say.
    notes:          what of the settings `--fix` has no word for.
    """

    trainer: str
    pins: Pins
    global_batch: int | None = None
    batch_per_rank: int | None = None
    precision: str | None = None
    notes: tuple[str, ...] = field(default=())


def several(**degrees: int) -> Pins:
    """Degrees; those of 1 are left open."""
    more: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree > 1}
    return Pins(**more)


def whole(name: str, value: object, least: int = 1) -> int:
    """A count of the settings. Raises `NotImported`."""
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise NotImported(
            f"{name} is {value!r}: a whole number from {least} is needed; write the number that "
            "the run had in place of what computes it"
        )
    return value


def zero_stage(name: str, value: object) -> int:
    """A level of ZeRO. Raises `NotImported`."""
    stage = whole(name, value, 0)
    if stage not in ZERO_LEVELS:
        raise NotImported(f"{name} {stage}: there are 0, 1, 2 and 3")
    return stage
