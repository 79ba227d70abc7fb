"""Rehearsals: right programs without a finding, planted mistakes by their line; clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.pytorch.training import load
from autopar.runtime.rehearsal import nccl, stand_ins, worker
from autopar.runtime.rehearsal import rehearse as rehearsing
from autopar.runtime.rehearsal.clocks import HOST, Clocks, Memory
from autopar.runtime.rehearsal.findings import reason_of
from autopar.runtime.rehearsal.rehearse import order_of_groups, rehearse
from autopar.runtime.rehearsal.second_device import Device
from autopar.runtime.rehearsal.watch import Watch
from autopar.torch_private.modes import FakeTensorMode
from benchmarks import rehearsals
from benchmarks.planned import planned_in
from tests import warm
from tests.sampling import some


@pytest.fixture
def warm_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    def python(words: Sequence[str], environment: Mapping[str, str] | None) -> tuple[int, str]:
        code, _, errors = warm.done(warm.python, [words], environment=environment)
        return code, errors

    monkeypatch.setattr(rehearsing, "python", python)


def test_a_read_that_waits_for_nobody_comes_too_early() -> None:
    clocks, memory = Clocks(), Memory()
    assert memory.writes(clocks, "a", clocks.starts("a")) is None
    assert memory.reads(clocks, "a", clocks.starts("a")) is None
    assert memory.reads(clocks, "b", clocks.starts("b")) == "a"
    clocks.wait("b", clocks.now("a"))
    assert memory.reads(clocks, "b", clocks.starts("b")) is None
    assert memory.writes(clocks, "a", clocks.starts("a")) == "b"  # while b may still read


def test_what_the_host_has_waited_for_all_streams_know() -> None:
    clocks, memory = Clocks(), Memory()
    memory.writes(clocks, "a", clocks.starts("a"))
    seen = clocks.now("a")
    later = clocks.starts("a")
    clocks.wait(HOST, seen)
    assert memory.reads(clocks, "b", clocks.starts("b")) is None
    assert not clocks.sees("b", "a", later)


@pytest.mark.parametrize(
    ("op", "tensors", "why"),
    [
        ("allreduce_", [torch.zeros(3)], ""),
        ("allreduce_", [torch.zeros(3, dtype=torch.bool)], ""),
        ("allreduce_", [torch.zeros(3, dtype=torch.complex64)], ""),
        ("allreduce_", [torch.zeros(3, dtype=torch.int16)], "NCCL has no int16"),
        ("allreduce_", [torch.zeros(4, 4)[:, ::2]], "without gaps"),
        ("allreduce_", [torch.zeros(4, 3).t()], ""),
        ("send", [torch.zeros(4, 3).t()], "contiguous"),
        ("_allgather_base_", [torch.zeros(8), torch.zeros(2)], ""),
        ("_allgather_base_", [torch.zeros(6), torch.zeros(2)], "6 elements for 4 pieces of 2"),
        ("_allgather_base_", [torch.zeros(0), torch.zeros(0)], ""),
        ("_reduce_scatter_base_", [torch.zeros(2), torch.zeros(6)], "6 elements for 4 pieces"),
    ],
)
def test_what_nccl_takes(op: str, tensors: list[torch.Tensor], why: str) -> None:
    said = nccl.refusal(op, tensors, 4)
    assert why in said
    assert bool(why) == bool(said)


def test_waits_that_are_meant_are_those_of_one_function() -> None:
    frames = [("/plan/program/train.py", 5, "main")]
    assert reason_of(frames) == "the loss is printed"
    assert reason_of([("/plan/program/train.py", 3, "backward"), *frames]) == ""


def test_groups_in_another_order_are_told() -> None:
    assert order_of_groups([[[0, 1], [0, 2]], [[2, 3], [0, 2]]], [0, 2]) == []
    (turned,) = order_of_groups([[[0, 1, 2], [0, 2]], [[0, 2], [0, 1, 2]]], [0, 2])
    assert turned.what == "rank 0 makes a process group with [0, 1, 2] next, rank 2 with [0, 2]"
    (short,) = order_of_groups([[[0, 2]], [[0, 2], [0, 2]]], [0, 2])
    assert short.what == "rank 2 makes a process group with [0, 2] next, rank 0 none"
    circle = [[[0, 1], [0, 2]], [[1, 2], [0, 1]], [[0, 2], [1, 2]]]
    assert len(order_of_groups(circle, [0, 1, 2])) == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_group_before_the_device_is_found(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(kind: str) -> None:
        if first:
            torch.cuda.set_device(0)
        dist.init_process_group("nccl")
        torch.cuda.set_device(0)

    device = Device(1, lambda what: None)
    told: list[str] = []
    monkeypatch.setattr(load, "start", start)
    try:
        stand_ins.join(1, 4, device, lambda kind, what: told.append(what))
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
    finally:
        dist.destroy_process_group()
    assert told == ([] if first else ["a process group is made before the device is set"])


@pytest.mark.slow
@pytest.mark.usefixtures("warm_rehearsals")
@pytest.mark.parametrize(
    ("family", "layout", "samples"),
    [("resnet", "stages, recompute", None), ("t5", "interleaved-1f1b", 2)],
)
@pytest.mark.some(1)
def test_stages_that_are_right(
    family: str, layout: str, samples: int | None, tmp_path: Path
) -> None:
    """Running statistics that one stage holds; a tensor that is sent to two ranks at once."""
    fix = {**rehearsals.EVERY[layout], **({"microbatch": str(samples)} if samples else {})}
    folders, refused = planned_in(family, tmp_path, {layout: fix})
    assert not refused
    assert rehearse(folders[layout]).wrong == ()


HALVES = {"float16": "llama", "bfloat16": "mixtral"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.some(1)
def test_half_precisions_wait_for_the_scale_alone(
    precision: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In bfloat16 experts go by the accelerator's kernel, for which the host does not wait."""
    if precision != "float16":  # which starts as a user's does
        request.getfixturevalue("warm_rehearsals")
    model = tmp_path / "workload.py"
    model.write_text(
        "from dataclasses import replace\n\nfrom benchmarks.zoo_models import ZOO\n\n"
        f"workload = replace(ZOO[{HALVES[precision]!r}](), precision={precision!r})\n"
    )
    layouts = {"sharded": rehearsals.PLANS["sharded"]}
    folders, refused = planned_in(str(model), tmp_path, layouts)
    assert not refused
    made = rehearse(folders["sharded"])
    assert made.wrong == ()
    waits = {Path(f.where.partition(":")[0]).name for f in made.findings}
    # Where ranks have experts of their own, the host asks how many rows these get.
    assert waits - {"loss_scale.py", "dispatch.py"} == {
        *("train.py", "portions.py", "metrics.py", "state.py")
    }
    assert ("loss_scale.py" in waits) == (precision == "float16")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_rehearsals")
def test_numbers_that_a_forward_asks_for_are_known_there(tmp_path: Path) -> None:
    """Those that it writes out, and those that all samples of the batch have."""
    model = tmp_path / "workload.py"
    model.write_text(
        "from functools import partial\n\nimport torch\n\nimport autopar\n"
        "from tests.emit.test_pieces_together import Model, _written, batch\n\n\n"
        "def body(model, x, grid):\n"
        "    (rows,) = torch.tensor([len(grid)], device=grid.device).tolist()\n"
        "    return _written(model, x, grid).view(rows, -1, x.shape[-1])\n\n\n"
        "workload = autopar.Workload(model=partial(Model, body), batch=batch)\n"
    )
    folders, refused = planned_in(str(model), tmp_path, {"plain": {"dp_shard": "2", "tp": "2"}})
    assert not refused
    assert rehearse(folders["plain"]).wrong == ()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_rehearsals")
def test_right_programs_have_no_finding(tmp_path: Path) -> None:
    layouts = {
        "stages": rehearsals.EVERY["stages, ZeRO 1"],
        "hybrid": rehearsals.EVERY["replicate x shard, ZeRO 1"],
        "replicas": rehearsals.EVERY["replicate x tp, recompute compute"],
    }
    folders, refused = planned_in("llama", tmp_path, layouts)
    offload = {"offload": {"offload": "optimizer", "dp_shard": "8", "zero": "2"}}
    gpus = "examples/clusters/h100_8.yaml"
    more, refused_too = planned_in("llama", tmp_path / "gpus", offload, gpus)
    assert not refused | refused_too
    for folder in [*folders.values(), *more.values()]:
        made = rehearse(folder)
        assert made.wrong == ()
        assert {finding.kind for finding in made.findings} == {"waits"}
        held = max(made.peak_bytes.values())  # of models so small that a batch counts
        assert 0.75 < held / made.planned_bytes < 1.02


def test_an_op_that_fails_has_its_line_where_its_error_is_lost() -> None:
    """C++ between a hook and `backward` may drop the frames, or make another error of it."""
    of_op, at = ValueError("no such view"), [("/plan/program/train.py", 55, "<lambda>")]
    for error in (
        SystemError("returned NULL without setting an exception"),
        ValueError(*of_op.args),
    ):
        watch = SimpleNamespace(program="/plan", failed=(of_op, at), findings={})
        worker.ended_by(watch, error)  # type: ignore[arg-type]
        (found,) = watch.findings.values()
        assert (found.what, found.where) == (
            "ValueError: no such view",
            "/plan/program/train.py:55 in <lambda>",
        )


def test_the_watch_knows_the_line_of_an_op_that_fails() -> None:
    watch = Watch(Device(1, lambda what: None), str(Path(__file__).parent))
    with FakeTensorMode(), watch, pytest.raises(RuntimeError, match="invalid for input"):
        torch.ones(4).view(7)
    assert watch.failed is not None
    error, frames = watch.failed
    assert "invalid for input" in str(error)
    assert frames[0][2] == "test_the_watch_knows_the_line_of_an_op_that_fails"


PLANTED = {
    "labels by a mask": "model.py:117 in forward",
    "a gradient as a number": "train.py:55 in <lambda>",
    "a hook that fails": "train.py:55 in <lambda>",
    "positions on the host": "model.py:110 in forward",
    "another stream is not waited for": "train.py:59 in backward",
    "16-bit integers": "train.py:57 in backward",
}


@pytest.mark.slow
def test_mistakes_are_found_by_their_line(tmp_path: Path) -> None:
    """One of each kind; `benchmarks.rehearsals --planted` has them all."""
    mistakes = some([m for m in rehearsals.MISTAKES if m.name in PLANTED], 3)
    rows = rehearsals.planted(tmp_path, 2, mistakes)
    assert [row["case"] for row in rows if not row["found"]] == []
    lines = [row["where"] for row in rows if row["kind"] != "none"]
    assert lines == [PLANTED[m.name] for m in mistakes]


def test_every_mistake_is_of_a_kind_that_there_is() -> None:
    assert {m.kind for m in rehearsals.MISTAKES} == {"waits", "mixes", "races", "refused", "fails"}
    assert len(rehearsals.MISTAKES) >= 20


def test_every_layout_is_met_by_several_models() -> None:
    met = Counter(name for family in rehearsals.FAMILIES for name in rehearsals.layouts_of(family))
    assert met.keys() == rehearsals.EVERY.keys()
    assert min(met.values()) >= 4
    assert rehearsals.layouts_of("llama", all_of_them=True) == rehearsals.EVERY
