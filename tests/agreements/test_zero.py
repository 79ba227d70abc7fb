"""What ZeRO splits and moves is one table: what a step moves follows from it on every path."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.lowering.state import Stored, state_collectives
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding
from autopar.nouns.zero import ZERO, ZERO_LEVELS, over
from autopar.planner.pricing.state import StateSharding

MESHES = ("dp_shard=4", "dp_replicate=2 x dp_shard=2", "dp_shard=2 x tp=2")
SIZE = 64


def issued(zero: int, mesh: Mesh, microbatches: int, framework: str) -> Counter[tuple[str, str]]:
    """Bytes of all collectives of one float32 parameter of a block, by kind and axis."""
    stored = [Stored("w", (SIZE, SIZE), "float32", Sharding(), unit="layer")]
    found = state_collectives(
        stored, mesh, zero, microbatches, "float32", False, framework=framework, loss=False
    )
    bytes_of: Counter[tuple[str, str]] = Counter()
    for entry in found:
        moved = entry.collective
        bytes_of[moved.kind, moved.axis] += entry.count * moved.size_bytes
    return bytes_of


def priced(zero: int, mesh: Mesh, microbatches: int) -> Counter[tuple[str, str]]:
    bytes_of: Counter[tuple[str, str]] = Counter()
    state = StateSharding(zero, mesh, microbatches, "float32")
    for _, moved, times in state.traffic(SIZE * SIZE, "float32"):
        bytes_of[moved.kind, moved.axis] += times * moved.size_bytes
    return bytes_of


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("zero", ZERO_LEVELS[1:])
def test_what_is_priced_is_what_is_issued(
    zero: int, mesh: str, microbatches: int, framework: str
) -> None:
    ranks = Mesh.parse(mesh)
    assert priced(zero, ranks, microbatches) == issued(zero, ranks, microbatches, framework)


def test_without_sharding_gradients_are_reduced_once() -> None:
    """The price takes the axes one after the other, the program both as one group."""
    ranks = Mesh.parse("dp_replicate=2 x dp_shard=2")
    whole = 4 * SIZE * SIZE
    assert issued(0, ranks, 3, "torch") == {("all_reduce", "dp_replicate+dp_shard"): whole}
    assert priced(0, ranks, 3) == {
        ("all_reduce", "dp_shard"): whole,
        ("all_reduce", "dp_replicate"): whole,
    }


def test_a_level_splits_all_that_the_one_below_it_splits() -> None:
    kinds = ("optimizer", "gradients", "parameters")
    for zero in ZERO:
        assert [getattr(zero, kind) for kind in kinds] == [zero.level > i for i in range(3)]
    assert all(over(level, 1) == ZERO[0] for level in ZERO_LEVELS)
