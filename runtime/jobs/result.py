"""What a run of a plan measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.nouns.style import Style


@dataclass(frozen=True, slots=True)
class RunResult:
    """``losses`` of the steps that were run; times in seconds, ``step_time_s`` their median.

    ``peak_memory_bytes`` is that of the fullest process; 0 where it was not measured. It is what
    ``memory_is`` says; ``memory_compares``: the prediction is of the same. ``phases_s``
    are medians on the first rank, by `autopar.runtime.pytorch.phases`; empty where not told apart.
    ``style``: how the program was executed. ``routes``: rows of the busiest expert over those of
    the mean, ``mean`` of all calls and ``worst``; likewise of the ``ranks`` that share a layer's
    experts, ``rank_mean`` and ``rank_worst``; empty without experts. ``expert_loads``: rows of each
    expert of a layer, by the module that holds them.
    """

    losses: tuple[float, ...]
    step_time_s: float
    predicted_step_time_s: float
    ranks: int
    step: int
    peak_memory_bytes: int = 0
    phases_s: Mapping[str, float] = field(default_factory=dict)
    memory_is: str = ""
    memory_compares: bool = True
    style: Style = "eager"
    routes: Mapping[str, float] = field(default_factory=dict)
    expert_loads: Mapping[str, Sequence[int]] = field(default_factory=dict)
