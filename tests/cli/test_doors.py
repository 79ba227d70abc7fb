"""``autopar export`` and ``autopar import`` as they are typed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.cli import app as cli

ROOT = Path(__file__).parents[2]
LLAMA = ("--arch", str(ROOT / "examples/archs/llama3_70b.yaml"))
H100 = ("--cluster", str(ROOT / "examples/clusters/h100_8x8.yaml"))
FIX = ("--fix", "tp=8,pp=4,zero=2,microbatches=16,recompute=full")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in ``tmp_path``; (exit code, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["autopar", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return call


def test_an_export_comes_back_and_is_priced_beside_the_fastest(run: Run, tmp_path: Path) -> None:
    code, out, err = run("export", *LLAMA, *H100, *FIX, "--to", "megatron", "-o", "out")
    assert (code, out) == (0, "out/megatron_args.sh\n")
    assert "not carried: the data and the tokenizer" in err
    assert "next: source megatron_args.sh" in err
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"megatron_args.sh", "autopar.json"}
    code, out, _ = run("import", "out/megatron_args.sh")
    assert out == "--fix tp=8,pp=4,zero=2,microbatch=1,schedule=1f1b,recompute=full\n"
    code, out, _ = run("import", "out/megatron_args.sh", *LLAMA, *H100, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["fix"].startswith("dp_shard=2,tp=8,pp=4,zero=2")
    assert answer["ours"]["step_time_s"] < answer["yours"]["step_time_s"]
    assert answer["ours"]["fits"]
    assert answer["because"]
    code, estimate, _ = run("estimate", *LLAMA, *H100, *FIX, "--global-batch", "32", "--json")
    assert json.loads(estimate)["step_time_s"] == answer["yours"]["step_time_s"]
    code, out, _ = run("import", "out/megatron_args.sh", *LLAMA, *H100)
    assert "your layout: " in out
    assert "; this plan: " in out
    assert ", because " in out


def test_a_refused_export_writes_nothing(run: Run, tmp_path: Path) -> None:
    code, out, err = run("export", *LLAMA, *H100, *FIX, "--to", "accelerate", "-o", "out")
    assert (code, out) == (2, "")
    assert "accelerate refuses pp 4" in err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_is_left_alone(run: Run, tmp_path: Path) -> None:
    words = ("export", *LLAMA, *H100, *FIX, "--to", "torchtitan", "-o", "out")
    assert run(*words)[0] == 0
    assert run(*words)[0] == 0
    recipe = tmp_path / "out/autopar_recipe.py"
    recipe.write_text(recipe.read_text() + "# mine\n")
    code, _, err = run(*words)
    assert code == 2
    assert "was edited since it was exported" in err
    recipe.unlink()
    (tmp_path / "out/notes.txt").write_text("mine")
    code, _, err = run(*words)
    assert code == 2
    assert "holds what no export wrote: notes.txt" in err
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("export", "--to", "megatron"), "either a plan or model, or --arch; it got neither"),
        (("export", "model.py", "--to", "megatron"), "add --cluster cluster.yaml --fix"),
        (("export", "a", *LLAMA, "--to", "ray"), "it got both"),
        (("export", ".", "--to", "ray", "--fix", "tp=2"), "--fix is for a model or --arch"),
        (("export", ".", "--to", "ray", "--precision", "bf16"), "--precision is for --arch"),
        (("export", ".", "--to", "rye"), "Did you mean ray?"),
        (("export", *LLAMA, *H100, "--to", "ray", "--precision", "fp8"), "exports carry bf16"),
        (("import", "none.json"), "cannot read none.json"),
        (("import", "a.json", *LLAMA), "add --cluster cluster.yaml"),
        (("import", "a.json", *H100), "add a model, or --arch"),
        (("import", "a.json", *LLAMA, *H100), "do not say the batch: add --global-batch"),
        (("import", "a.json", "m.py", *LLAMA), "a model or --arch, not both"),
    ],
)
def test_what_cannot_be_is_one_message(
    run: Run, tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "a.json").write_text('{"zero_optimization": {"stage": 2}}')
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert expected in err
    assert not (tmp_path / "export").exists()
