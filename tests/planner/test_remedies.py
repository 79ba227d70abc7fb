"""Where nothing fits, the change that is named was priced and does fit."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest

from autopar.nouns.errors import DoesNotFit
from autopar.planner.advice import remedies
from autopar.planner.advice.remedies import search_or_advise
from autopar.planner.ask.question import Question
from autopar.planner.ask.sentences import size_text
from autopar.planner.search.layouts import search_plan
from autopar.planner.solve.standings import NothingFits
from tests.planner.graphs import gpt
from tests.planner.test_search import LARGE, NODE, question

BATCH, DEVICES = 4, 4  # few, for few layouts
GRAPH = gpt(layers=2, **{**LARGE, "b": BATCH})


def on(devices: int, limit_bytes: int, **fix: str) -> Question:
    """The question for as many devices of one node."""
    device = replace(NODE.device, memory_bytes=limit_bytes)
    groups = (replace(NODE.groups[0], device=device, count=devices),)
    levels = (*NODE.levels[:-1], replace(NODE.levels[-1], span=devices))
    return question(GRAPH, BATCH, replace(NODE, groups=groups, levels=levels), fix)


@functools.cache
def least(cut: bool = True, **fix: str) -> int:
    """Bytes of the tightest layout with these choices, found where nothing fits."""
    with pytest.raises(NothingFits) as error:
        search_plan(replace(on(DEVICES, 1, **fix), obstacles=() if cut else ("statistics",)))
    assert error.value.tightest is not None
    return error.value.tightest.priced.memory.total


@functools.cache
def needed(**fix: str) -> int:
    """Bytes of the fastest layout with these choices."""
    return search_plan(on(DEVICES, NODE.device.memory_bytes, **fix)).best.priced.memory.total


def refused(limit_bytes: int, **fix: str) -> str:
    with pytest.raises(DoesNotFit) as error:
        search_or_advise(on(DEVICES, limit_bytes, **fix))
    return str(error.value)


def test_a_degree_that_stands_in_the_way_is_named_with_the_price_of_leaving_it_out() -> None:
    fix = {"dp_replicate": "4", "microbatch": "1"}  # one sample a rank: no less is possible
    limit = (least(**fix) + least()) // 2
    text = refused(limit, **fix)
    assert "The cheapest change that fits: without --fix dp_replicate=4 (" in text
    best = search_plan(on(DEVICES, limit, microbatch="1")).best
    held, offered = (size / 2**30 for size in (best.priced.memory.total, limit))
    assert f"{held:.1f} GiB of {offered:.1f} GiB, {best.priced.time.total_s:.3g} s a step" in text


def test_a_change_of_the_same_degrees_is_named_before_other_degrees() -> None:
    fix = {"dp_replicate": "4", "recompute": "none", "offload": "none"}
    sharded = needed(dp_shard="4", zero="3", recompute="none", microbatch="1")
    text = refused((needed(microbatch="1", **fix) + sharded) // 2, **fix)
    first, _, second = text.partition("The cheapest change that fits: ")[2].partition("; ")
    assert first.startswith(("without --fix recompute=none (", "without --fix offload=none ("))
    assert "(dp_replicate=4, dp_shard=1, tp=1, " in first
    assert second.startswith("with other degrees, without --fix dp_replicate=4 (")
    slower, faster = (re.search(r"(\S+) s a step", part) for part in (first, second))
    assert slower is not None
    assert faster is not None
    assert float(faster[1]) < float(slower[1])


def test_pins_that_do_not_help_alone_are_given_up_together_before_a_degree() -> None:
    degrees = {"dp_replicate": "1", "dp_shard": "4", "tp": "1"}
    pins = {"recompute": "none", "offload": "none"}
    alone = [least(**degrees, **{name: value}) for name, value in pins.items()]
    limit = (least(**degrees) + min(alone)) // 2
    assert limit < min(alone)
    text = refused(limit, **degrees, **pins)
    both = "without --fix recompute=none,offload=none (dp_replicate=1, dp_shard=4, tp=1, "
    assert f"fits: {both}" in text


def test_a_smaller_batch_is_named_where_the_batch_may_not_be_cut() -> None:
    # A whole batch would fit halfway, squeezed.
    asked = on(DEVICES, least() + (least(cut=False) - least()) // 3)
    with pytest.raises(DoesNotFit) as error:
        search_or_advise(replace(asked, obstacles=("statistics over the batch",)))
    parts = search_plan(asked).best.decided.candidate.microbatches
    assert parts > 1
    assert f"fits: a batch of {BATCH // parts} samples in place of {BATCH}" in str(error.value)


def test_more_devices_are_named_only_where_they_are_enough() -> None:
    limit = int(0.8 * least())
    text = refused(limit)
    match = re.search(r"fits: (\d+) devices in place of 4, joined by nvlink too", text)
    assert match, text
    count = int(match[1])
    assert search_plan(on(count, limit)).best.priced.memory.total <= limit
    with pytest.raises(NothingFits):
        search_plan(on(count // 2, limit))


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(5 << 30, "5.0 GiB"), (1 << 30, "1.0 GiB"), (12 << 20, "12.0 MiB")]
)
def test_sizes_are_told_in_the_unit_that_shows_them(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


def test_where_no_change_helps_those_that_were_tried_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remedies, "catalogue", dict)  # no larger device to name
    text = refused(100_000_000, zero="1", microbatch="1")
    assert "None of the changes that were tried fits: without --fix zero=1, " in text
    assert "cheapest" not in text
