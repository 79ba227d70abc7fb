"""What the settings of a run say of its layout, in the words of ``--fix``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.nouns.errors import UserError


class NotImported(UserError):
    """Settings that cannot be read as a layout: which, and what to do."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One layout.

    choices:        as ``--fix`` takes them. Degrees of 1 are left out, and so is ``dp_shard``
                    where it is what the devices leave.
    global_batch:   samples of one step, None where the settings do not say.
    batch_per_rank: samples of one step on one data rank, where that is what they say.
    precision:      bf16, fp16, fp32; None where they do not say.
    notes:          what of the settings `--fix` has no word for.
    """

    trainer: str
    choices: Mapping[str, str]
    global_batch: int | None = None
    batch_per_rank: int | None = None
    precision: str | None = None
    notes: tuple[str, ...] = field(default=())

    def fix(self) -> str:
        """``tp=2,pp=2,zero=1``"""
        return ",".join(f"{name}={value}" for name, value in self.choices.items())


def choices_of(**counts: int | str) -> dict[str, str]:
    """Choices without degrees of 1; an ``interleave`` brings its schedule."""
    words = ("zero", "microbatch", "microbatches", "recompute", "schedule", "sequence_parallel")
    return {
        name: str(value)
        for name, value in counts.items()
        if name in words or int(value) not in (0, 1)
    }


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
