"""What ZeRO splits and moves is one table: what a step moves follows from it on every path."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.files.cluster_file import load_cluster
from autopar.lowering.state import (
    Stored,
    TwoLevel,
    count_sums,
    cutting_axes,
    state_collectives,
    sums,
)
from autopar.nouns.mesh import Mesh
from autopar.nouns.sharding import Sharding, split
from autopar.nouns.zero import ZERO, ZERO_LEVELS, over
from autopar.pricing.state import StateSharding
from autopar.pricing.step_time import sums_s
from autopar.pricing.summary import Summary
from autopar.pricing.units.moves import move_time_s
from autopar.pricing.units.unit import Kind, Unit

CLUSTER = load_cluster("examples/clusters/cpu_4.yaml")
MESHES = ("dp_shard=4", "dp_replicate=2 x dp_shard=2", "dp_shard=2 x tp=2")
SIZE = 64


FROZEN = 3 * SIZE


def issued(
    zero: int, mesh: Mesh, microbatches: int, framework: str, precision: str = "float32"
) -> Counter[tuple[str, str]]:
    """Bytes of all collectives of two float32 parameters of a block, of which one is frozen, by
    kind and axis."""
    stored = [
        Stored("w", (SIZE, SIZE), "float32", Sharding(), unit="layer"),
        Stored("base", (FROZEN, SIZE), "float32", Sharding(), trainable=False, unit="layer"),
    ]
    entries = state_collectives(
        stored, mesh, zero, microbatches, precision, False, framework=framework, loss_bytes=0
    )
    bytes_of: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        moved = entry.collective
        bytes_of[moved.kind, moved.axis] += entry.count * moved.size_bytes
    return bytes_of


def priced(
    zero: int, mesh: Mesh, microbatches: int, framework: str, precision: str
) -> Counter[tuple[str, str]]:
    bytes_of: Counter[tuple[str, str]] = Counter()
    state = StateSharding(zero, mesh, microbatches, precision, framework=framework)
    for _, moved, times in state.traffic(SIZE * SIZE, Kind("float32"), FROZEN * SIZE):
        bytes_of[moved.kind, moved.axis] += times * moved.size_bytes
    return bytes_of


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("zero", ZERO_LEVELS)
def test_what_is_priced_is_what_is_issued(
    zero: int, mesh: str, microbatches: int, framework: str, precision: str
) -> None:
    asked = zero, Mesh.parse(mesh), microbatches, framework, precision
    assert priced(*asked) == issued(*asked)


@pytest.mark.parametrize("exchanges", [True, False])
def test_on_two_levels_a_piece_alone_goes_across(exchanges: bool) -> None:
    """Of what experts along ``cp`` share, as the library adds it up."""
    experts = Sharding((("cp", split(0)),))
    stored = [
        Stored("w", (SIZE, SIZE), "float32", Sharding()),
        Stored("e", (6, 3), "float32", experts),
    ]
    how, mesh = TwoLevel(3, exchanges), Mesh.parse("dp_replicate=2 x cp=3")
    entries = state_collectives(stored, mesh, 0, 2, "float32", False, loss_bytes=0, two_level=how)
    whole, scatter = 4 * SIZE * SIZE, "all_to_all" if exchanges else "reduce_scatter"
    assert [(e.collective.kind, e.collective.axis, e.collective.size_bytes) for e in entries] == [
        (scatter, "dp_replicate+cp/inside", whole),
        ("all_reduce", "dp_replicate+cp/across", whole // 3),
        ("all_gather", "dp_replicate+cp/inside", whole),
        ("all_reduce", "dp_replicate", 2 * 3 * 4),
    ]


def test_without_sharding_gradients_are_reduced_once_by_all_data_ranks() -> None:
    ranks = Mesh.parse("dp_replicate=2 x dp_shard=2")
    whole = 4 * SIZE * SIZE
    assert issued(0, ranks, 3, "torch") == {("all_reduce", "dp_replicate+dp_shard"): whole}


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("mesh", [*MESHES, "dp_replicate=4", "pp=2 x dp_shard=2", "1"])
@pytest.mark.parametrize("zero", ZERO_LEVELS)
def test_norm_loss_and_counts_are_priced_as_they_are_issued(
    zero: int, mesh: str, framework: str
) -> None:
    """To the second: each as long as that collective by itself."""
    ranks = Mesh.parse(mesh)
    model = Sharding.parse("tp:S0") if "tp" in mesh else Sharding()
    stored = [Stored("w", (SIZE, SIZE), "float32", model, unit="layer")]
    of_all = [
        *sums(ranks, cutting_axes(stored, ranks, zero, framework), clips=True),
        *count_sums(ranks, 1),
    ]
    trained = {Kind("float32"): SIZE * SIZE}
    unit = Unit(
        1.0, 1.0, 0, 0, 0, (0, 0), trained, {}, {}, {}, cutting=frozenset(dict(model.placements))
    )
    summary = Summary(unit, {}, (), {}, {}, 0, counts=1)
    inner = Mesh.parse(mesh.removeprefix("pp=2 x "))
    state = StateSharding(zero, inner, 1, "float32", clips=True)
    once = sums_s(summary, state, CLUSTER, ranks.size("pp"))
    expected = {
        entry.what: move_time_s(
            CLUSTER,
            ranks,
            entry.collective.kind,
            entry.collective.axis,
            entry.collective.size_bytes,
        )
        for entry in of_all
    }
    assert once.loss_s == expected.get("loss", 0.0)
    assert once.norm_s == expected.get("gradient norm", 0.0)
    assert (once.loss_s > 0) == (set(ranks.axes) - {"tp"} != set())
    assert once.counts_s == expected.get("counts", 0.0)


def test_a_level_splits_all_that_the_one_below_it_splits() -> None:
    kinds = ("optimizer", "gradients", "parameters")
    for zero in ZERO:
        assert [getattr(zero, kind) for kind in kinds] == [zero.level > i for i in range(3)]
    assert all(over(level, 1) == ZERO[0] for level in ZERO_LEVELS)
