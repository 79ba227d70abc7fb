"""torch's own lists as referee: they are schedules here too, and ours take no longer."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from autopar.pipeline.actions import Action, ActionKind, Schedule, one_route
from autopar.pipeline.check import held
from autopar.pipeline.play import Costs, play
from autopar.pipeline.schedules.table import schedule
from tests.pipeline.test_play import unit

REFEREE: Any = theirs
KINDS: dict[Any, ActionKind] = {
    REFEREE.FORWARD: "F",
    REFEREE.FULL_BACKWARD: "B",
    REFEREE.BACKWARD_INPUT: "I",
    REFEREE.BACKWARD_WEIGHT: "W",
}
STOCK = {
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", False),
    "breadth-first": ("ScheduleLoopedBFS", False),
    "zb-interleaved": ("ScheduleInterleavedZeroBubble", False),
    "zb-v": ("ScheduleZBVZeroBubble", True),
    "dualpipe-v": ("ScheduleDualPipeV", True),
}


def stock(name: str, pp: int, microbatches: int) -> Schedule:
    """The lists that torch's class makes for two stages a rank."""
    class_name, vee = STOCK[name]
    cls = getattr(REFEREE, class_name)
    made = cls.__new__(cls)
    made.pp_group_size, made._n_microbatches = pp, microbatches
    made.n_local_stages, made._num_stages, made.num_stages = 2, 2 * pp, 2 * pp
    made._stages = [None, None]
    made.number_of_rounds = microbatches // pp
    made.microbatches_per_round = pp
    lists = tuple(
        tuple(_actions(made._calculate_single_rank_operations(rank))) for rank in range(pp)
    )
    ranks = (*range(pp), *(reversed(range(pp)) if vee else range(pp)))
    return one_route(class_name, ranks, lists, microbatches)


def _actions(given: Any) -> Any:
    for one in given:
        if one is None:
            continue
        for part in one.sub_actions or (one,):
            if part.computation_type in KINDS:
                kind = KINDS[part.computation_type]
                yield Action(part.stage_index, kind, part.microbatch_index)


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_our_lists_take_no_longer_and_hold_no_more(name: str, pp: int, m: int) -> None:
    reference = stock(name, pp, m)
    ours = schedule(name, pp, m, 1 if STOCK[name][1] else 2)
    assert play(ours, Costs(unit)).step_s <= play(reference, Costs(unit)).step_s
    assert max(held(ours)) <= max(held(reference))
