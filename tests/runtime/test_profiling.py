"""What `autopar profile` runs: ops as the rules see them, chains that stay normal, phases."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cli.profile import _left_out, _measurement
from autopar.cost_models.calibrate import op_rates
from autopar.cost_models.profile_db import Measurement
from autopar.runtime.jobs.host_memory import ENVIRONMENT, environment, forget_peak, resident_bytes
from autopar.runtime.profile.bench import Bench
from autopar.runtime.profile.cases import Case, cases
from autopar.runtime.profile.figures import groups
from autopar.runtime.profile.ops import Chain
from autopar.runtime.pytorch.phases import PHASES, Stopwatch

CPU = torch.device("cpu")


def smallest() -> list[Case]:
    """The first, and so the smallest, case of every kind."""
    first: dict[str, Case] = {}
    for case in cases(1):
        first.setdefault(f"{case.kind} {len(case.operands[-1])}", case)
    return list(first.values())


@pytest.mark.parametrize("case", smallest(), ids=lambda case: f"{case.kind} {case.name}")
def test_a_chain_computes_what_its_case_says_with_normal_numbers(case: Case) -> None:
    torch.manual_seed(0)
    chain = Chain(case, torch.float32, CPU)
    chain.forward()
    assert all(tuple(made.shape) == case.result for made in chain._made)
    chain.backward()
    tiny = torch.finfo(torch.float32).tiny
    for x in [*chain._firsts, *(x for others in chain._others for x in others)]:
        if x.grad is not None:
            sizes = x.grad.abs()
            assert torch.isfinite(sizes).all()
            assert ((sizes > 0) & (sizes < tiny)).float().mean() < 0.01
    chain.clear()
    assert chain._firsts[0].grad is None


def test_every_case_is_priced_by_the_rules_and_names_its_kind() -> None:
    rows = []
    for case in cases(1):
        work = case.work("float32")
        assert work.forward_bytes > 0, case
        assert " " not in case.name
        key = f"{work.cost} {work.kind} forward fp32 {case.name}"
        seconds = 1e-6 + work.forward_bytes * 1e-10
        args = (work.forward_bytes, work.forward_flops, seconds, 0.1, 5, "2026-01-01")
        rows.append(Measurement("op", key, *args))
    kinds = {rate.kind for rate in op_rates(rows)}
    assert {"linear", "attention", "bias", "add", "cross_entropy", "embedding", ""} <= kinds


def test_groups_are_all_that_an_axis_of_a_mesh_can_have() -> None:
    assert list(groups(4)) == [(2, 1), (2, 2), (4, 1)]
    assert {(2, 4), (4, 2)} <= set(groups(8))
    assert list(groups(6)) == [(2, 1)]


def test_only_measurements_are_read_from_what_processes_print() -> None:
    assert _measurement("W1121 something else\n") is None
    line = '{"subject": "op", "key": "k", "size_bytes": 1.0, "flops": 0.0, "seconds": 0.1, '
    measurement = _measurement(line + '"spread": 0.0, "repeats": 3}')
    assert measurement is not None
    assert (measurement.subject, measurement.seconds) == ("op", 0.1)


@pytest.mark.parametrize("middle_s", [0.0, -3e-6])
def test_a_collective_that_adds_no_time_is_left_out_and_said(
    middle_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = object.__new__(Bench)
    bench.rank = 0
    bench.write("collective", "all_gather 2 1", 64.0, 0.0, [middle_s - 1e-6, middle_s, 5e-6])
    line = capsys.readouterr().out
    assert _measurement(line) is None
    (reason,) = _left_out(line)
    assert reason.startswith("collective all_gather 2 1 64 B: left out, it added ")
    assert f"{middle_s * 1e6:.1f} us" in reason
    bench.write("collective", "all_gather 2 1", 64.0, 0.0, [2e-9, 2e-9, 5e-6])
    line = capsys.readouterr().out
    measurement = _measurement(line)
    assert measurement is not None
    assert measurement.seconds == 2e-9
    assert not _left_out(line)


class Written(Bench):
    """A bench whose ranks took what was written down: [ranks, repeats, calls]."""

    def __init__(self, taken: torch.Tensor) -> None:
        self.taken, self.settles = taken, False

    def _times(self, calls: Sequence[Callable[[], Any]], settles: bool = False) -> torch.Tensor:
        del calls
        self.settles = settles
        return self.taken


def test_ops_take_the_mean_over_ranks_and_collectives_the_slowest() -> None:
    taken = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[3.0, 2.0], [1.0, 8.0]]])
    bench = Written(taken)
    assert bench.mean(print, print) == [[2.0, 2.0], [2.0, 6.0]]
    assert bench.slowest(print, print, settles=True) == [[3.0, 3.0], [2.0, 8.0]]
    assert bench.settles
    waited = Written(taken[..., :1]).waited(print)
    assert waited == [1.0] * 5  # a second behind the mean, whichever rank it is


def test_laps_add_up_by_phase() -> None:
    watch = Stopwatch(CPU)
    watch.start()
    for phase in ("forward", "backward", "forward", "optimizer"):
        watch.lap(phase)
    seconds = watch.seconds()
    assert tuple(seconds) == PHASES
    marks = watch._marks
    assert math.isclose(sum(seconds.values()), marks[-1][1] - marks[0][1])
    assert seconds["exchange"] == 0.0
    watch.start()
    assert sum(watch.seconds().values()) == 0.0


def test_processes_keep_their_heap_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with environment():
        assert os.environ["GLIBC_TUNABLES"] == ENVIRONMENT["GLIBC_TUNABLES"]
        assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "GLIBC_TUNABLES" not in os.environ
    assert os.environ["OMP_NUM_THREADS"] == "7"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_the_peak_of_a_process_starts_again() -> None:
    # Its own mapping: an allocator may keep what it frees.
    with mmap.mmap(-1, 1 << 28) as block:
        block.write(b"1" * len(block))
        high = resident_bytes(peak=True)
    forget_peak()
    assert resident_bytes() <= resident_bytes(peak=True) < high
