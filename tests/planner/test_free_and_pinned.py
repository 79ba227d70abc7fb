"""What is found with more pinned is never faster than what is found with less."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from autopar.nouns.cluster import Cluster
from autopar.nouns.errors import UserError
from autopar.planner.search.layouts import AS_FAST, search_plan
from tests.planner.graphs import gpt
from tests.planner.test_pipeline_search import FOUR
from tests.planner.test_search import LARGE, question

PINS = (
    *({"pp": pp} for pp in "12"),
    *({"tp": tp} for tp in "124"),
    {"zero": "0"},
    {"recompute": "none"},
)
MIB = 2**20
BATCH = 4
ROOMY = 5201
"""MiB that the best plan takes where memory does not bind."""


def of_memory(memory_bytes: int) -> Cluster:
    (group,) = FOUR.groups
    device = replace(group.device, memory_bytes=memory_bytes)
    return replace(FOUR, groups=(replace(group, device=device),))


@pytest.mark.parametrize("memory", [2 * ROOMY, ROOMY * 3 // 4, ROOMY * 6 // 10])
def test_more_pins_never_give_a_faster_plan(memory: int) -> None:
    """With room, and where memory binds. A pipeline that gains less than `AS_FAST` is left out."""
    graph = gpt(layers=3, **{**LARGE, "b": BATCH})
    steps: dict[frozenset[tuple[str, str]], float] = {}
    for more in range(3):
        for some in combinations(PINS, more):
            fix = {name: value for pins in some for name, value in pins.items()}
            if len(fix) < more:
                continue
            try:
                best = search_plan(question(graph, BATCH, of_memory(memory * MIB), fix)).best
            except UserError:
                continue
            pins, step_s = frozenset(fix.items()), best.priced.time.total_s
            for fewer, other_s in steps.items():
                if fewer < pins:
                    assert other_s <= step_s * AS_FAST, (sorted(fewer), sorted(pins))
            steps[pins] = step_s
    assert steps
