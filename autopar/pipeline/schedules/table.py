"""Every schedule by the name that ``--fix schedule=`` takes, and what it asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.nouns.errors import did_you_mean
from autopar.pipeline.actions import Schedule, ScheduleError
from autopar.pipeline.schedules.interleaved import breadth_first, interleaved
from autopar.pipeline.schedules.one_way import eager_one_f_one_b, gpipe, one_f_one_b
from autopar.pipeline.schedules.waves import chimera, hanayo
from autopar.pipeline.schedules.zero_bubble import dualpipe_v, zb_h1, zb_h2, zb_interleaved, zb_v


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of schedules.

    make:     of ranks, microbatches and ``interleave``.
    stages:   a rank has, where ``interleave`` is 1; each further one adds as many.
    interleaves: ``interleave`` may be more than 1.
    turns:    microbatches must be a multiple of the ranks.
    least:    microbatches that the schedule needs, by the number of ranks.
    even_ranks: the ranks must be an even number.
    splits: backward is I and W.
    sliced: as ``make``, and of slices that sequences pass in.
    """

    make: Callable[[int, int, int], Schedule]
    stages: int = 1
    interleaves: bool = False
    turns: bool = False
    least: Callable[[int], int] = lambda pp: 1
    even_ranks: bool = False
    splits: bool = False
    sliced: Callable[[int, int, int, int], Schedule] | None = None


SCHEDULES: Mapping[str, Kind] = {
    "gpipe": Kind(gpipe, sliced=gpipe),
    "1f1b": Kind(one_f_one_b, sliced=one_f_one_b),
    "eager-1f1b": Kind(eager_one_f_one_b, sliced=eager_one_f_one_b),
    "interleaved-1f1b": Kind(interleaved, interleaves=True, turns=True),
    "breadth-first": Kind(breadth_first, interleaves=True),
    "zb-h1": Kind(zb_h1, splits=True, sliced=zb_h1),
    "zb-h2": Kind(zb_h2, splits=True, sliced=zb_h2),
    "zb-interleaved": Kind(zb_interleaved, interleaves=True, turns=True, splits=True),
    "zb-v": Kind(zb_v, stages=2, least=lambda pp: 2 * pp - 1, splits=True),
    "dualpipe-v": Kind(dualpipe_v, stages=2, least=lambda pp: 2 * pp, splits=True),
    "hanayo": Kind(hanayo, stages=2, interleaves=True),
    "chimera": Kind(chimera, least=lambda pp: 2, even_ranks=True),
}


def schedule(
    name: str, pp: int, microbatches: int, interleave: int = 1, slices: int = 1
) -> Schedule:
    """The schedule ``name`` over ``pp`` ranks; ``interleave``: stages a rank, for waves half of it;
    ``slices``: of each sequence, every one of which is a microbatch.

    Raises `ScheduleError` as `kind_of` does.
    """
    kind = kind_of(name, pp, microbatches, interleave, slices)
    if kind.sliced is not None:
        return kind.sliced(pp, microbatches, interleave, slices)
    return kind.make(pp, microbatches, interleave)


def kind_of(name: str, pp: int, microbatches: int, interleave: int = 1, slices: int = 1) -> Kind:
    """What a schedule is of, where it can have these counts.

    Raises:
        ScheduleError: an unknown name, or counts that the schedule cannot have, with those it can.
    """
    kind = SCHEDULES.get(name)
    if kind is None:
        raise ScheduleError(
            f"schedule={name}: {did_you_mean(name, SCHEDULES)}choose among {', '.join(SCHEDULES)}"
        )
    if slices > 1 and kind.sliced is None:
        may = ", ".join(name for name, kind in SCHEDULES.items() if kind.sliced is not None)
        raise ScheduleError(
            f"schedule={name} has the backwards of a sequence's {slices} slices in the order of "
            f"its forwards, and they come the other way round: take one of {may}, or leave "
            "seq_slices out"
        )
    if interleave > 1 and not kind.interleaves:
        raise ScheduleError(
            f"schedule={name} has {kind.stages} stage{'s' * (kind.stages > 1)} a rank, not "
            f"{interleave * kind.stages}: leave interleave out, or take interleaved-1f1b, "
            "breadth-first, zb-interleaved or hanayo"
        )
    if kind.turns and microbatches % pp:
        near = dict.fromkeys(max(1, microbatches // pp + more) * pp for more in (0, 1))
        raise ScheduleError(
            f"schedule={name} passes {pp} microbatches at a time through {pp} ranks, and "
            f"{microbatches} microbatches are no multiple of {pp}: take "
            f"{' or '.join(map(str, near))}, or "
            f"{'breadth-first' if name == 'interleaved-1f1b' else 'zb-h1'}"
        )
    if microbatches < kind.least(pp):
        raise ScheduleError(
            f"schedule={name} over {pp} ranks fills with {kind.least(pp)} microbatches, and the "
            f"step has {microbatches}: take at least {kind.least(pp)}, or a schedule that needs "
            "fewer, such as zb-h1 or 1f1b"
        )
    if kind.even_ranks and pp % 2:
        raise ScheduleError(
            f"schedule={name} runs two pipelines that meet in the middle, and {pp} ranks have "
            f"none: take {pp + 1} or {pp - 1} ranks, or 1f1b"
        )
    return kind
