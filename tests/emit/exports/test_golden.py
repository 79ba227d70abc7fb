"""Every export of every case, letter by letter; and what each target refuses."""

from __future__ import annotations

import ast
import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import yaml

from autopar.emit.exports.setup import Machines
from autopar.emit.exports.targets import TARGETS, target
from autopar.emit.exports.text import Refused
from autopar.nouns.errors import UserError
from tests.emit.exports.setups import CASES, experts, golden, gpt, layout


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_files_are_as_before(case: str, name: str) -> None:
    folder = golden(case, name)
    refused = folder / "refused.txt"
    if refused.exists():
        with pytest.raises(Refused) as caught:
            TARGETS[name](CASES[case]())
        assert f"{caught.value}\n" == refused.read_text()
        assert "; nothing was written" in str(caught.value)
        return
    made = TARGETS[name](CASES[case]())
    kept = {f.name.removesuffix(".golden"): f.read_text() for f in folder.glob("*.golden")}
    assert dict(made.files) == kept
    notes = json.loads((folder / "said.json").read_text())
    assert {"left_out": list(made.left_out), "start": made.start} == notes


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_files_are_what_their_ending_says_and_name_what_is_left_out(case: str, name: str) -> None:
    try:
        made = TARGETS[name](CASES[case]())
    except Refused:
        return
    for file, text in made.files.items():
        parse(file, text)
    comments = [
        " ".join(line.lstrip("# -") for line in text.splitlines() if line.startswith("#"))
        for file, text in made.files.items()
        if not file.endswith(".json")
    ]
    assert comments
    assert all(note in comment for note in made.left_out for comment in comments)


def parse(file: str, text: str) -> Any:
    match file.rpartition(".")[2]:
        case "py":
            return ast.parse(text)
        case "json":
            return json.loads(text)
        case "yaml" | "yml":
            return yaml.safe_load(text)
        case "sh" | "sbatch":
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
            return text
    raise AssertionError(f"what is {file}?")


@pytest.mark.parametrize(
    ("name", "setup", "message"),
    [
        ("torchtitan", layout(precision="float16"), "precision float16.*bfloat16 or float32"),
        ("torchtitan", layout(sequence=8190), "a sequence of 8190.*multiple of 8"),
        ("torchtitan", layout(schedule="zb-interleaved"), "zb-interleaved with interleave 1"),
        ("torchtitan", layout(interleave=2), "interleave 2.*schedule=interleaved-1f1b"),
        ("torchtitan", experts(ep=3), "ep 3: it must divide .* = 16"),
        ("torchtitan", layout(layers=None), "pp 2: a stage is a list of layers"),
        ("torchtitan", layout(interleave=32, schedule="interleaved-1f1b"), "64 stages.* 32 layers"),
        ("megatron", layout(schedule="gpipe"), "schedule gpipe: it plays 1f1b and interleaved"),
        ("megatron", layout(schedule="zb-interleaved", interleave=2), "schedule zb-interleaved"),
        ("megatron-bridge", layout(schedule="gpipe"), "megatron-bridge refuses schedule gpipe"),
        (
            "megatron",
            layout(
                pp=4,
                cp=1,
                interleave=2,
                schedule="interleaved-1f1b",
                global_batch=12,
                microbatches=6,
            ),
            "6 microbatches with interleave 2: they are no multiple of pp 4",
        ),
        ("deepspeed", layout(), "pp 2: its pipelines are code"),
        (
            "deepspeed",
            layout(pp=1, cp=1, dp_replicate=2, schedule="none", microbatches=8),
            "dp_replicate 2 x dp_shard 2.*Give dp_shard=4",
        ),
        ("accelerate", layout(), "pp 2: its ParallelismConfig has no pipeline"),
        ("accelerate", experts(), "ep 4: its ParallelismConfig has no experts"),
        (
            "accelerate",
            layout(pp=1, schedule="none", dp_replicate=2, dp_shard=1, zero=0),
            "Give dp_shard=2 in place",
        ),
        (
            "accelerate",
            layout(pp=1, schedule="none", zero=0, dp_shard=1, dp_replicate=1, microbatches=8),
            "cp 2 with ZeRO 0: its context parallelism needs FSDP2",
        ),
        (
            "accelerate",
            layout(pp=1, cp=1, schedule="none", machines=Machines(1, 4, "cpu-core", "cpu")),
            "on CPU processes.*Give dp_replicate=4,zero=0",
        ),
        ("transformers", layout(cp=1), "pp 2 x dp 2: it does not combine"),
        ("transformers", layout(pp=1, schedule="none"), "cp 2.*export to accelerate"),
        ("transformers", experts(cp=1, ep=3), "ep 3: it must be a multiple of tp 2"),
        ("maxtext", layout(layers=33), "2 stages: they must divide the 33 layers"),
        ("levanter", layout(), "pp 2: its mesh is replica x data x model"),
        ("partition-specs", layout(), "a model of no framework"),
        ("slurm", layout(machines=Machines(4, 4, "TPU-v5p", "tpu")), "Export to skypilot"),
        (
            "skypilot",
            layout(machines=Machines(4, 4, "TPU-v6e", "tpu", slices=2)),
            "2 slices of TPU",
        ),
        (
            "skypilot",
            layout(machines=Machines(2, 8, "A100-80GB", ranks="ranks 0 to 7 on H100, 8 to 15 on")),
            "devices of several kinds: .* ranks 0 to 7 on H100.* --node-rank in that order",
        ),
        (
            "ray",
            CASES["gpt_jax"],
            "a JAX job",
        ),  # captured late
    ],
)
def test_what_the_target_would_refuse_is_refused_first(name: str, setup: Any, message: str) -> None:
    given = setup() if callable(setup) else setup
    with pytest.raises(Refused, match=message):
        TARGETS[name](given)


def test_a_target_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="Did you mean megatron-bridge"):
        target("megatron_bridge")


def test_microbatches_have_equal_samples() -> None:
    with pytest.raises(UserError, match=r"a batch of 16: 2 data ranks x 7 .* a multiple of 14"):
        gpt(microbatches=7)


def test_maxtext_has_what_lies_across_slices_on_the_network() -> None:
    slices = Machines(4, 64, "TPU-v6e", "tpu", slices=4)
    setup = layout(
        pp=1,
        cp=1,
        schedule="none",
        tp=4,
        dp_shard=16,
        dp_replicate=4,
        microbatches=1,
        global_batch=256,
        machines=slices,
    )
    text = TARGETS["maxtext"](setup).files["autopar.yml"]
    for line in (
        "dcn_data_parallelism: 4",
        "ici_fsdp_parallelism: 16",
        "ici_tensor_parallelism: 4",
    ):
        assert line in text
    one = replace(setup, machines=replace(slices, slices=1))
    assert "dcn" not in TARGETS["maxtext"](one).files["autopar.yml"]
