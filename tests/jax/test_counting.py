"""Collectives counted in modules as compilers wrote them (jax 0.10.2; libtpu 0.0.52 for v5e)."""

from pathlib import Path

import pytest

from autopar.lowering.collectives import Row
from autopar.runtime.verify.jax import counting
from autopar.runtime.verify.jax.hlo import parse
from autopar.runtime.verify.jax.replica_groups import group_of

MODULES = Path(__file__).parent / "hlo"


def counted(name: str, mesh: dict[str, int]) -> list[Row]:
    return counting.collectives((MODULES / f"{name}.txt").read_text(), mesh)


def test_a_loop_of_a_tpu_module() -> None:
    """6 times: a gather, one that runs beside compute (in three places of the text), a scatter that
    is a fusion of an all-reduce, and a sum; behind it two sums as one. The exchange of uneven rows
    behind the scatter is part of it."""
    assert counted("v5e_loop", {"dp": 4, "tp": 4}) == [
        Row("all_gather", "dp", 2048 * 2048 * 2, 12),
        Row("all_reduce", "dp+tp", (2048 + 1024) * 4, 1),
        Row("all_reduce", "tp", 2048 * 2, 6),
        Row("reduce_scatter", "dp", 2048 * 2048 * 4, 6),
    ]


def test_what_other_cores_of_a_tpu_run_counts() -> None:
    rows = [Row("reduce_scatter", "dp_shard", 128 * 4 * 4, 1)]
    assert counted("tpu7x_other_core", {"dp_replicate": 4, "dp_shard": 2}) == rows


@pytest.mark.parametrize(
    ("name", "mesh", "rows"),
    [
        (
            "cpu_mesh_in_another_order",
            {"dp": 4, "tp": 2},
            [Row("all_gather", "tp", 32 * 16 * 4, 1), Row("all_reduce", "dp", 16 * 16 * 4, 1)],
        ),
        (
            "cpu_mesh_of_two_axes",
            {"a": 2, "b": 2, "c": 2},
            [Row("all_reduce", "a+c", 64 * 16 * 4, 1)],
        ),
        (
            "cpu_mesh_of_part_of_an_axis",
            {"x": 8},
            [
                Row("all_gather", "devices [0, 4]", 2 * 32 * 4, 1),
                Row("all_reduce", "devices [0, 1, 2, 3]", 32 * 4, 1),
            ],
        ),
    ],
)
def test_modules_that_shardy_partitioned(name: str, mesh: dict[str, int], rows: list[Row]) -> None:
    assert counted(name, mesh) == rows


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("cpu_sum_then_slice", Row("reduce_scatter", "tp", 16 * 16 * 4, 1)),
        ("cpu_sum_then_slice_of_columns", Row("reduce_scatter", "dp", 16 * 16 * 4, 1)),
    ],
)
def test_a_sum_of_which_each_device_reads_its_piece_may_count_as_asked(name: str, row: Row) -> None:
    mesh = {"dp": 4, "tp": 2}
    text = (MODULES / f"{name}.txt").read_text()
    assert counting.collectives(text, mesh, by_readers=True) == [row]
    assert [other.kind for other in counting.collectives(text, mesh)] == ["all_reduce"]
    both = (MODULES / "cpu_mesh_in_another_order.txt").read_text()
    assert counting.collectives(both, mesh, by_readers=True) == counting.collectives(both, mesh)


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups={{0,3},{1,2}}", {0, 3}),
        ("replica_groups=[2,4]<=[8]", {0, 1, 2, 3}),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", {0, 4}),
        ("replica_groups=mesh['x'=4,'y'=2] {'x'}", {0, 2, 4, 6}),
        ("replica_groups=mesh['x'=4,'y'=2] {'y','x'}", set(range(8))),
        ("replica_groups=mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}", {0, 4}),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=[3,2,1,0] {'x'}", {0, 2}),
        ("replica_groups=mesh['x'=8] {'x':(1)2}", {0, 4}),
        ("replica_groups=mesh['x'=8] {'x':(2)2}", {0, 2}),
        ("source_target_pairs={{0,1},{1,0}}", {0, 1}),
        ("source_target_pairs={{2,4},{4,2},{0,2},{1,3},{3,1}}", {0, 2, 4}),
    ],
)
def test_groups_in_every_form(text: str, group: set[int]) -> None:
    assert (
        group_of(f"%a = f32[8]{{0}} all-reduce(%x), channel_id=1, {text}, to_apply=%add") == group
    )


def test_a_form_that_is_not_known_is_no_guess() -> None:
    with pytest.raises(NotImplementedError, match="without groups"):
        group_of("%a = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add")


LOOP = """
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %step = s32[] constant(STEP)
  %next = s32[] add(%i, %step)
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %sum = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %sum)
}

%condition (s: (s32[], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %last = s32[] constant(7)
  ROOT %less = pred[] compare(%i.1, %last), direction=WAY
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0)
  %first = s32[] FIRST
  %copied = s32[] copy(%first)
  %given = (s32[], f32[8]{0}) tuple(%copied, %x.1)
  %loop = (s32[], f32[8]{0}) while(%given), condition=%condition, body=%body
  ROOT %y = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("first", "step", "way", "times"),
    [
        ("constant(0)", "1", "LT", 7),
        ("constant(1)", "2", "LT", 3),
        ("constant(0)", "2", "LT", 4),
        ("constant(9)", "1", "LT", 0),
        ("constant(0)", "1", "NE", None),
        ("iota(), iota_dimension=0", "1", "LT", None),
    ],
)
def test_a_loop_without_a_trip_count_is_read(
    first: str, step: str, way: str, times: int | None
) -> None:
    text = LOOP.replace("FIRST", first).replace("STEP", step).replace("WAY", way)
    module = parse(text)
    assert module.trips(module.computations["main"].instructions["loop"]) == times
    if times is None:
        with pytest.raises(counting.UnknownTripCount, match="how often the loop body runs"):
            counting.collectives(text, {"x": 2})
    else:
        rows = [Row("all_reduce", "x", 32, times)] if times else []
        assert counting.collectives(text, {"x": 2}) == rows
