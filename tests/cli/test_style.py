"""``--style`` from the command line to the plan's folder, and back out of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autopar.cli import app as cli
from autopar.files.plan_folder import read_plan
from autopar.nouns.style import STYLES
from autopar.report.revisit import open_folder

ROOT = Path(__file__).parents[2]


def test_a_compiled_plan_says_so_and_costs_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--cluster", str(ROOT / "examples/clusters/cpu_4.yaml"), "--fix", "tp=2,dp_shard=2")
    for style in STYLES:
        folder = tmp_path / style
        words = ("plan", str(ROOT / "examples/02_gpt.py"), *where, "--style", style)
        monkeypatch.setattr(sys, "argv", ["autopar", *words, "-o", str(folder), "--json"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        assert json.loads(capsys.readouterr().out)["style"] == style
        assert read_plan(folder).style == style
        assert f"execution       {style}" in (folder / "report.txt").read_text()
        again = open_folder(folder)  # prices with the same kernels
        assert again.time.total_s == pytest.approx(read_plan(folder).prediction.step_time_s)
    eager, layers, compiled = (read_plan(tmp_path / style).prediction for style in STYLES)
    assert compiled.compute_time_s <= layers.compute_time_s < eager.compute_time_s
    assert compiled.memory_bytes == layers.memory_bytes == eager.memory_bytes


def test_what_is_around_compiled_layers_keeps_its_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--cluster", str(ROOT / "examples/clusters/cpu_4.yaml"), "--style", "layers")

    def planned(model: str, *fix: str) -> tuple[int | str | None, str]:
        words = ("plan", model, *where, "-o", str(tmp_path / "plan"), "--fix", ",".join(fix))
        monkeypatch.setattr(sys, "argv", ["autopar", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capsys.readouterr().err

    gpt = str(ROOT / "examples/02_gpt.py")
    assert not planned(gpt, "dp_shard=2", "loss_chunks=4")[0]
    program = tmp_path / "plan" / "program"
    assert 'state.compile("layers")' in (program / "train.py").read_text()
    assert "linear_cross_entropy(" in (program / "model.py").read_text()
    code, text = planned(gpt, "dp_shard=2", "tp=2", "tp_pieces=2")
    assert code == 2
    assert "--style eager" in text
    code, text = planned(str(ROOT / "examples/01_mlp.py"), "dp_shard=2")
    assert code == 2
    assert "no layers of the model repeat" in text


@pytest.mark.parametrize("style", [*STYLES, "fastest"])
def test_a_model_by_its_sizes_is_priced_in_one_style(
    style: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("-c", str(ROOT / "examples/clusters/h100_8x8.yaml"), "--global-batch", "64")
    arch = ("estimate", "--arch", str(ROOT / "examples/archs/mixtral_8x7b.yaml"))
    words = (*arch, *where, "--fix", "tp=8", "--style", style, "--json")
    monkeypatch.setattr(sys, "argv", ["autopar", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    if style == "fastest":
        assert ended.value.code == 2
        assert "choose eager, layers or compiled" in err
    else:
        assert not ended.value.code
        assert json.loads(out)["style"] == style


def test_the_fastest_style_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pieces of collectives are of eager programs alone, fused kernels of the others."""
    where = ("--cluster", str(ROOT / "examples/clusters/cpu_4.yaml"), "--style", "fastest")
    for fix, style in (("tp=2,dp_shard=2", "layers"), ("tp=2,dp_shard=2,tp_pieces=2", "eager")):
        words = ("plan", str(ROOT / "examples/02_gpt.py"), *where, "--fix", fix)
        monkeypatch.setattr(sys, "argv", ["autopar", *words, "-o", str(tmp_path / "plan")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        assert read_plan(tmp_path / "plan").style == style
        said = capsys.readouterr().err
        assert all(f"--style {one}: " in said for one in STYLES)


def test_jax_refuses_to_be_eager(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jax")
    where = ("--cluster", str(ROOT / "examples/clusters/cpu_4.yaml"))
    words = ("estimate", str(ROOT / "examples/05_gpt_jax.py"), *where, "--style", "eager")
    monkeypatch.setattr(sys, "argv", ["autopar", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "JAX always compiles" in capsys.readouterr().err
