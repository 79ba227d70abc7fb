"""``--fix`` of choices that no backend emits: the layout is priced, and no program is written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.cli import app as cli
from autopar.planner.ask.pins import unemitted

ROOT = Path(__file__).parents[2]
GPT = str(ROOT / "examples/02_gpt.py")
H100 = ("--cluster", str(ROOT / "examples/clusters/h100_8.yaml"))
ON = "sequence_parallel=on"
CPU = ("--cluster", str(ROOT / "examples/clusters/cpu_4.yaml"))
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


@pytest.mark.parametrize(
    ("fix", "choices"),
    [
        ({"tp": "4", "recompute": "full", "zero": "3", "schedule": "none", "pp": "1"}, ()),
        ({"tp": "4", "pp": "2", "microbatch": "1", "schedule": "zb-v", "interleave": "2"}, ()),
        ({"cp": "2", "ep": "2", "tp": "2"}, ()),
        ({"cp": "2", "pp": "2"}, ()),
        ({"recompute": "selective"}, ("recompute=selective",)),
        (
            {"schedule": "gpipe", "sequence_parallel": "off"},
            ("sequence_parallel=off",),
        ),
    ],
)
def test_choices_that_no_backend_emits(fix: dict[str, str], choices: tuple[str, ...]) -> None:
    assert unemitted(fix) == choices


GOLDEN = """\
PATH: 0.9 M parameters on 8 H100 (8 H100), fp32, eager
layout dp_replicate=1,dp_shard=1,tp=2,cp=2,ep=1,pp=2,zero=1,global_batch=16,microbatch=2,\
schedule=gpipe,interleave=1,recompute=none,sequence_parallel=on
step TIME (band TIME to TIME) # tokens/s # per device MFU # %

where the time goes
 layer compute TIME # %
 head TIME # %
 tensor TIME # %
 context TIME # %
 bubble TIME # %
 data TIME # %
 optimizer TIME # %
 other TIME # %

peak memory of rank 0
 parameters SIZE
 gradients SIZE
 optimizer SIZE
 activations SIZE
 buffers SIZE
 reserved SIZE
 outside SIZE
 total SIZE (band SIZE to SIZE) of SIZE
 of it SIZE allocated, SIZE reserved; most for outside, buffers, activations

fits
layers: read off the model's graph, op by op
constants of the time: # fitted, # assumed (cost_models/fitted.yaml)
priced by the transformer family; no backend emits {ON} yet, so no program is written
note: of a parameter, 4 bytes are the weight, 4 the gradient and 8 what the optimizer keeps
"""


def shape_of(text: str) -> str:
    """``text`` without the figures that constants of the cost model decide, and columns."""
    kept = []
    for line in text.replace(GPT, "PATH").splitlines():
        if not line.startswith(("PATH", "layout", "peak", "priced", "note")):
            line = re.sub(r"\d[\d.,]*(e-?\d+)?", "#", line)
            line = re.sub(r"# [mun]?s\b", "TIME", line)
            line = re.sub(r"# ([KMG]i)?B\b", "SIZE", line)
        kept.append(re.sub(" +", " ", line))
    return "\n".join(kept) + "\n"


def test_plan_shows_the_price_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    fix = f"cp=2,pp=2,tp=2,microbatch=2,schedule=gpipe,{ON}"
    code, out, err = run("plan", GPT, *H100, "--fix", fix, "-o", "made")
    assert code == 0
    assert shape_of(out) == GOLDEN.replace("{ON}", ON)
    assert f"nothing is written to made/: no backend emits {ON} yet" in err
    assert not list(tmp_path.iterdir())


def test_estimate_prints_one_object(run: Run) -> None:
    code, out, err = run(
        "estimate",
        GPT,
        *CPU,
        "--fix",
        f"cp=2,tp=2,{ON}",
        "--json",
        "--style",
        "compiled",
    )
    data = json.loads(out)
    assert (code, data["fits"], data["not_emitted"]) == (0, True, [ON])
    assert data["priced_by"] == "transformer family"
    assert data["architecture"]["layers"] == 4
    assert data["style"] == "compiled"
    assert "cp=2" in data["layout"]
    assert "written" not in err
    # The layout reads back: it holds the batch of the model.
    again = run("estimate", GPT, *CPU, "--fix", data["layout"], "--json", "--style", "compiled")
    assert json.loads(again[1])["step_time_s"] == data["step_time_s"]


def test_a_layout_that_does_not_fit_ends_with_3(run: Run) -> None:
    llama = str(ROOT / "benchmarks/llama3.py") + ":llama_70b"
    for command in ("plan", "estimate"):
        code, out, _ = run(command, llama, *H100, "--fix", f"cp=2,tp=4,{ON}")
        assert code == 3
        assert "does not fit: " in out
        assert "fits, at " in out or "no layout of 8 devices fits" in out
        assert "global_batch=64" not in out.partition("does not fit")[2]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            (f"cp=3,{ON}",),
            "cp 3 x pp 1 x dp_replicate 1 = 3 does not divide 8 devices",
        ),
        (
            (f"pp=4,interleave=2,{ON}",),
            "pp 4 x interleave 2 = 8 stages do not divide 4 layers",
        ),
        (("tp=8,recompute=selective",), "tp 8 does not divide heads 4"),
        (
            (f"cp=2,tp=4,microbatch=3,{ON}",),
            "dp 1 x microbatch 3 = 3 does not divide the global batch 16",
        ),
        ((f"ep=2,{ON}",), "ep 2 for a model without experts"),
        ((f"cp=2,dp_shard=8,{ON}",), "= 16, but the cluster has 8 devices"),
        ((f"cp=two,{ON}",), "cp=two: give a whole number from 1"),
        ((f"{ON},recompute=compute",), "there is recompute none, selective or full"),
        ((f"{ON},widht=2",), "'widht' cannot be fixed. Choose among dp_replicate"),
        ((f"{ON},global_batch=8",), "the batch of"),
        ((f"{ON},pp=2,schedule=none",), "schedule=none: choose gpipe"),
        (
            (ON, "--searcher", "mcts"),
            f"--searcher has no effect with --fix {ON}",
        ),
        (
            (ON, "--allow-replicated", "sort"),
            "--allow-replicated has no effect",
        ),
    ],
)
def test_layouts_that_cannot_be_end_with_2(run: Run, words: tuple[str, ...], expected: str) -> None:
    for command in ("plan", "estimate"):
        code, out, err = run(command, GPT, *H100, "--fix", *words)
        assert (code, out) == (2, "")
        assert expected in err


def test_a_model_that_is_no_transformer_ends_with_2(run: Run, tmp_path: Path) -> None:
    resnet = str(ROOT / "examples/04_resnet.py")
    code, out, err = run("plan", resnet, *CPU, "--fix", f"{ON},tp=2")
    assert (code, out) == (2, "")
    assert f"{resnet} cannot be priced as a transformer: none of its ops is known as att" in err
    assert f"Leave {ON} out, or price figures of your own with `autopar estimate --arch`" in err
    assert not list(tmp_path.iterdir())


def test_a_profile_has_no_effect(run: Run) -> None:
    code, _, err = run("plan", GPT, *CPU, "--fix", ON, "--profile", "p.db")
    assert code == 2
    assert f"--profile has no effect with --fix {ON}" in err


def test_what_is_priced_beyond_the_model_is_noted(run: Run, tmp_path: Path) -> None:
    text = Path(GPT).read_text()
    text = text.replace('optimizer="adamw"', 'optimizer="sgd", precision="bfloat16"')
    text = text.replace(
        "        self.head =", "        self.norm.bias.requires_grad_(False)\n        self.head ="
    )
    (tmp_path / "gpt.py").write_text(text)
    code, out, _ = run("estimate", "gpt.py", *H100, "--fix", ON)
    assert code == 0
    assert "bf16, eager" in out
    assert out.splitlines()[-3:] == [
        "note: of a parameter, 4 bytes are the weight, 4 the gradient and 8 what the optimizer "
        "keeps",
        "note: AdamW is priced; sgd keeps less",
        "note: 128 frozen parameters are priced as trained",
    ]
