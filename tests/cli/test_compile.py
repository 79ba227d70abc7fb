"""`autopar plan --compile`: the step compiled for the cluster's devices, beside the plan."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from autopar.cli import app as cli
from tests.plans import cluster_text

ROOT = Path(__file__).parents[2]
GPT = str(ROOT / "examples/05_gpt_jax.py")


def called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["autopar", "plan", *words, "--compile"])
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


def test_a_plan_for_cpus_is_compiled_by_the_xla_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jax")
    (tmp_path / "cluster.yaml").write_text(cluster_text(4))
    words = ("-c", str(tmp_path / "cluster.yaml"), "-o", str(tmp_path / "plan"), "--json")
    fixed = ("--fix", "dp_shard=2,tp=2,zero=3")
    code, out, _ = called(monkeypatch, capsys, GPT, *words, *fixed)
    assert code == 0
    made = json.loads(out)["compiled"]
    assert made["target"] == "4 CPU devices"
    assert made["memory_bytes"]["total"] > made["memory_bytes"]["arguments"] > 0
    kinds = {(row["kind"], row["axis"]) for row in made["collectives"]}
    assert {("all_gather", "dp_shard"), ("reduce_scatter", "dp_shard")} <= kinds
    for row in made["collectives"]:
        assert row["compiled_bytes"] == row["planned_bytes"], row
    assert (tmp_path / "plan" / "plan.json").exists()


@pytest.mark.parametrize(
    ("model", "cluster", "says"),
    [
        (GPT, "h100_8.yaml", "--compile: no compiler for 8 H100 without one of them"),
        (GPT, "tpu_v5e_16.yaml", "libtpu is not installed"),
        (str(ROOT / "examples/01_mlp.py"), "cpu_4.yaml", "is a model of PyTorch"),
    ],
)
def test_what_cannot_be_compiled_is_one_message(
    model: str,
    cluster: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("jax")
    if "libtpu" in says and importlib.util.find_spec("libtpu"):
        pytest.skip("libtpu is here")
    where = ("-c", str(ROOT / "examples/clusters" / cluster), "-o", str(tmp_path / "plan"))
    code, _, err = called(monkeypatch, capsys, model, *where)
    assert code == 2
    assert says in err.partition("autopar: ")[2]
    assert "Traceback" not in err
