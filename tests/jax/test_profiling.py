"""What `autopar profile --framework jax` runs and writes, and which figures price a plan."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.cli.profile import _measurement, libraries
from autopar.cost_models.calibrate import calibrate, collective_curves, op_rates
from autopar.cost_models.profile_db import Machine, Measurement, ProfileDb
from autopar.cost_models.slices import generations, jax_kind
from autopar.files.cluster_file import load_cluster
from autopar.nouns.workload import Workload
from autopar.planner import Options, plan
from autopar.runtime.profile import figures
from autopar.runtime.profile.cases import Case, cases
from autopar.runtime.profile.jax import worker
from autopar.runtime.profile.jax.bench import Bench
from autopar.runtime.profile.jax.collectives import PART, WHOLE, exchanges
from autopar.runtime.profile.jax.ops import CALLS, Chain, Update

HERE = load_cluster("examples/clusters/cpu_4.yaml")


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(set(), 2, enough_s=0.0, fewest=1)


def smallest() -> list[Case]:
    """The first, and so the smallest, case of all that is called."""
    first: dict[str, Case] = {}
    for case in cases(1):
        first.setdefault(case.called, case)
    return [case for name, case in first.items() if name in CALLS]


def test_all_that_graphs_of_jax_have_is_measured() -> None:
    assert {case.called for case in cases(1)} - set(CALLS) == {"rotary"}


@pytest.mark.parametrize("case", smallest(), ids=lambda case: case.called)
def test_a_chain_computes_what_its_case_says_with_normal_numbers(case: Case, bench: Bench) -> None:
    chain = Chain(case, "float32", bench, chain_bytes=1.0)
    made, _ = chain.made
    shape = case.result or (1,)
    assert {x.shape for x in made} == {(2 * shape[0], *shape[1:])}
    tiny = jnp.finfo(jnp.float32).tiny
    (gradients,) = chain.backward(*chain.made)
    wanted = {i for i in (0, *case.trained) if i not in case.below}
    assert {place for _, place in gradients} == wanted
    for x in [*made, *gradients.values()]:
        assert np.isfinite(x).all()
        assert ((x != 0) & (abs(x) < tiny)).mean() < 0.01


def test_gradients_of_a_chain_are_those_of_its_ops(bench: Bench) -> None:
    case = next(case for case in cases(1) if case.kind == "linear")
    chain = Chain(case, "float32", bench, chain_bytes=1.0)
    firsts, others = chain.operands

    def total(x: Any) -> Any:
        for (weight,) in others:
            x = x @ weight[: weight.shape[0] // 2].T  # as one device has it
        return x.sum()

    (gradients,) = chain.backward(*chain.made)
    rows = firsts[0].shape[0] // 2
    np.testing.assert_allclose(gradients[0, 0][:rows], jax.grad(total)(firsts[0][:rows]), rtol=1e-4)


def test_an_update_is_that_of_adamw(bench: Bench) -> None:
    update = Update(64, bench)
    weight, gradient, first, second = update.operands
    made = update.step(*update.operands)
    mean, square = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
    expected = weight * (1 - 1e-6) - 1e-4 * mean / (jnp.sqrt(square) + 1e-8)
    for one, other in zip(made, (expected, mean, square), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_every_collective_runs_over_every_group_as_often_as_it_says() -> None:
    seen = set()

    def compiled(function: Any, operands: Any) -> str:
        return str(function.lower(*operands).compile().as_text())

    for exchange in exchanges(4, figures.SIZES[:1]):
        seen.add(exchange.key)
        text = compiled(exchange.call, exchange.operands)
        name = {"p2p": "collective-permute"}.get(exchange.kind, exchange.kind.replace("_", "-"))
        assert text.count(f"{name}(") + text.count(f"{name}-start(") == exchange.rounds, exchange
        assert f"{name}(" not in compiled(exchange.none, exchange.operands)
    kinds = {*WHOLE, *PART}
    assert seen == {f"{kind} {group}" for kind in kinds for group in ("2x1", "2x2", "4x1")}


def test_what_it_writes_is_what_prices_read(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "times", lambda self, *calls: [[2e-3, 3e-3, 4e-3] for _ in calls])
    monkeypatch.setattr(bench, "start_s", 1e-3)
    for case in smallest()[:3]:
        worker.measure_case(bench, case, "float32", 1.0)
    worker.measure_updates(bench, (64,))
    ops = [_measurement(line) for line in capsys.readouterr().out.splitlines()]
    rates = {(r.kind, r.direction) for r in op_rates([m for m in ops if m is not None])}
    assert {("linear", "forward"), ("attention", "backward"), ("adamw", "forward")} <= rates
    taken = iter([2e-3, 10e-3] * 100)
    monkeypatch.setattr(Bench, "times", lambda self, *calls: [[next(taken)] * 3 for _ in calls])
    worker.measure_collectives(bench, (1 << 15,))
    rows = [_measurement(line) for line in capsys.readouterr().out.splitlines()]
    (reduced,) = (c for c in collective_curves([r for r in rows if r]) if c.kind == "all_reduce")
    ((size, taken_s),) = reduced.points
    assert (reduced.ranks, size) == (2, 1 << 15)
    assert math.isclose(taken_s, 8e-3 / 8)  # by the rounds


def test_what_is_known_is_not_measured_again(
    bench: Bench, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = smallest()[0]
    monkeypatch.setattr(Bench, "times", lambda self, *calls: [[2e-3, 3e-3, 4e-3] for _ in calls])
    monkeypatch.setattr(bench, "start_s", 1e-3)
    worker.measure_case(bench, case, "float32", 1.0)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    known = {(r["subject"], r["key"], r["size_bytes"], r["flops"]) for r in lines if "flops" in r}
    assert len(known) == 2
    worker.measure_case(Bench(known, 2, 0.0, 1), case, "float32", 1.0)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("devices", "kind"), [("999", ""), ("1", "TPU v5 lite")])
def test_devices_that_are_not_here_end_it_with_the_reason(
    devices: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tmp_path / "known.json"
    known.write_text("[]")
    monkeypatch.setattr("sys.argv", ["worker", str(known), devices, kind])
    with pytest.raises(SystemExit, match="profile where the devices are"):
        worker.begun()


def test_every_kind_of_tpu_has_the_name_that_jax_gives_it() -> None:
    assert {jax_kind(kind.device) for kind in generations().values()} == {
        "TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x",
    }  # fmt: skip
    assert jax_kind("H100-SXM") == ""


# --- which figures price a plan -------------------------------------------------------------------


def profiled(path: Path, seconds: Mapping[str, float]) -> Path:
    """A profile of this kind of device by library, with the seconds of one product."""
    with ProfileDb(path) as db:
        for library, taken in seconds.items():
            key = "matmul linear forward fp32 64x64,64x64"
            when = "2026-11-01T00:00:00+00:00"
            row = Measurement("op", key, 5e4, 5e5, taken, 0.1, 9, when)
            db.add(Machine(HERE.device.name, "a driver", library), row)
    return path


def line() -> Workload:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(batch["x"] @ params["w"]))

    return Workload(
        loss=loss,
        init=lambda key: {"w": jax.random.normal(key, (64, 64))},
        batch=lambda step=0: {"x": np.ones((64, 64), np.float32)},
    )


def test_a_plan_of_jax_is_priced_by_what_jax_measured(tmp_path: Path) -> None:
    both = profiled(tmp_path / "both.db", {"jax 0.0.1": 8e-3, "torch 9.9.9": 1e-3})
    said: list[str] = []
    ours = calibrate(HERE, both, libraries("jax"), said.append)
    assert "with jax 0.0.1" in ours.device.source
    assert "here is jax" in said[0]
    assert "torch 9.9.9" in calibrate(HERE, both, libraries("torch"), said.append).device.source
    only = profiled(tmp_path / "only.db", {"torch 9.9.9": 1e-3})
    said.clear()
    calibrate(HERE, only, libraries("jax"), said.append)
    assert "`autopar profile --framework jax` measures again" in said[0]


def test_the_planner_asks_for_the_machine_by_framework(tmp_path: Path) -> None:
    asked: list[str] = []
    both = profiled(tmp_path / "both.db", {"jax 0.0.1": 8e-3, "torch 9.9.9": 1e-3})

    def at_hand(cluster: Any, framework: str) -> str:
        asked.append(framework)
        return str(both)

    options = Options(at_hand=at_hand, libraries=libraries)
    made = plan("line.py:line", HERE, {"dp_replicate": "4"}, options, workload=line()).plan
    assert asked == ["jax"]
    assert made.prediction.step_time_s > 0.5 * 3 * 8e-3 / 4
    assert math.isfinite(made.prediction.step_time_s)
