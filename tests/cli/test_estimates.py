"""``autopar estimate`` where it searches, and its table of devices."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.cli import app as cli

ROOT = Path(__file__).parents[2]
NODE = ("--cluster", str(ROOT / "examples/clusters/h100_8.yaml"))
SIZES = """
name: small
layers: 8
hidden: 8192
heads: 64
kv_heads: 8
ffn: 28672
vocab: 32000
sequence: 4096
"""
ARCH = ("estimate", "--arch", "sizes.yaml", *NODE)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command beside ``sizes.yaml``; (exit code, stdout, stderr)."""
    (tmp_path / "sizes.yaml").write_text(SIZES)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["autopar", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return call


def test_nothing_pinned_is_searched_and_what_it_names_reads_back(run: Run) -> None:
    code, out, _ = run(*ARCH, "--batch-tokens", "131072", "--json")
    answer = json.loads(out)
    assert code == 0
    assert "global_batch=32" in answer["layout"]
    assert answer["layouts"] > len(answer["others"]) > 0
    other = answer["others"][0]
    code, out, _ = run(*ARCH, "--fix", other["fix"], "--json")
    again = json.loads(out)
    assert (code, again["step_time_s"]) == (0, pytest.approx(other["step_time_s"]))
    assert "others" not in again
    assert answer["step_time_s"] <= again["step_time_s"]


def test_layouts_side_by_side_have_one_batch_and_say_which(run: Run) -> None:
    code, out, _ = run(*ARCH, "--global-batch", "32")
    assert code == 0
    assert "layouts, all with --global-batch 32: --fix " in out
    assert "nothing says the batch" not in out
    batches = set()
    for fix in ("tp=8", "dp_shard=8"):
        code, out, _ = run(*ARCH, "--fix", fix, "--json")
        (note,) = json.loads(out)["notes"]
        found = re.search(r"of (\d+) sequences.*; --global-batch (\d+) prices", note)
        assert found is not None
        assert found[1] == found[2]
        batches.add(found[1])
        assert f"global_batch={found[1]}" in json.loads(out)["layout"]
    assert batches == {"4", "32"}


def test_devices_that_differ_are_priced_as_the_slowest_and_that_is_told(run: Run) -> None:
    mixed = ("--cluster", str(ROOT / "examples/clusters/a100_8_h100_8.yaml"))
    fix = ("--fix", "dp_shard=16,zero=3,global_batch=32")
    code, out, _ = run("estimate", "--arch", "sizes.yaml", *mixed, *fix)
    assert code == 0
    assert "note: 8 x A100-80GB, 8 x H100: all are priced as A100-80GB, the slowest kind" in out
    assert "16 A100-80GB" in out


def test_a_table_of_devices(run: Run) -> None:
    code, out, err = run(*ARCH, "--devices", "16,1,8", "--global-batch", "32")
    assert (code, err) == (0, "1 devices\n8 devices\n16 devices\n")
    table = out.splitlines()
    assert table[0] == "small: a batch of 32 sequences of 4,096 tokens on H100"
    assert [line.split()[0] for line in table[2:5]] == ["1", "8", "16"]
    assert "layouts fits" in table[2]
    assert "rows of more than 8 devices, joined by nvlink too" in out
    assert table[-1].startswith("fewest devices that fit: 2, at ")


def test_a_longer_sequence_takes_longer_and_a_model_file_may_be_varied_too(run: Run) -> None:
    fix = ("--fix", "tp=8", "--global-batch", "8", "--json")
    short, long = (json.loads(run(*ARCH, *fix, "--seq", n)[1]) for n in ("2048", "8192"))
    assert long["step_time_s"] > 2 * short["step_time_s"]  # optimizer and gradients stay
    model = ("estimate", str(ROOT / "examples/02_gpt.py"), *NODE)
    code, out, _ = run(*model, "--devices", "1,8", "--seq", "256", "--batch-tokens", "16384")
    assert code == 0
    assert "a batch of 64 sequences of 256 tokens" in out
    assert "note: priced by the transformer family" in out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--devices", "8,many"), 2, "give numbers of devices, as in --devices 16,32,64"),
        (("--devices", ","), 2, "give numbers of devices"),
        (("--devices", "12"), 0, ""),
        (
            ("--batch-tokens", "-1"),
            2,
            "-1 are no whole number of sequences of 4096 tokens; give 4096",
        ),
        (("--batch-tokens", "5000"), 2, "give 4096 (1 sequences) or 8192 (2 sequences)"),
        (("--batch-tokens", "4096", "--global-batch", "1"), 2, "both say the batch; give one"),
        (("--seq", "0"), 2, "--seq 0: give a number of tokens from 1"),
        (("--global-batch", "7"), 0, ""),
        (("--seq", "4194304", "--global-batch", "8"), 3, "layouts of small fits on 8 devices; "),
    ],
)
def test_what_cannot_be_is_told(run: Run, words: tuple[str, ...], code: int, says: str) -> None:
    ended, _, err = run(*ARCH, *words)
    assert ended == code
    assert says in err


def test_a_model_outside_the_family_is_told_what_to_do(run: Run) -> None:
    code, _, err = run("estimate", str(ROOT / "examples/04_resnet.py"), *NODE, "--devices", "8")
    assert code == 2
    assert "cannot be priced as a transformer, as --devices" in err
    code, _, err = run("estimate", "model.py", *NODE, "--devices", "8", "--searcher", "mcts")
    assert code == 2
    assert "--searcher is for a model file that is planned" in err
