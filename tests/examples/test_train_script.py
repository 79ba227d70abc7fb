"""The complete training script: on four processes, stopped by SIGTERM, gone on with on two."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.examples.script_logs import losses_of
from tests.plans import cluster_text
from tests.warm import code_of
from tests.warm_ranks import loose

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/07_train_script.py"


def test_ten_of_at_most_120_lines_are_autopars() -> None:
    lines = SCRIPT.read_text().splitlines()
    own = [line for line in lines if re.search(r"^import autopar|autopar\.\w+\(|trainer\.", line)]
    assert len(lines) < 120
    assert len(own) <= 10


def start(ranks: int, output: Path, log: Path, fix: str) -> BaseProcess:
    """The script on some processes, that end together, as torchrun starts them."""
    cluster = output / f"{ranks}.yaml"
    cluster.parent.mkdir(exist_ok=True)
    cluster.write_text(cluster_text(ranks))
    arguments = ["--cluster", cluster, "--fix", fix, "--output", output, "--dtype", "float64"]
    arguments += ["--samples", "90", "--epochs", "2", "--evaluate-every", "3"]
    with log.open("wb") as to:
        words = [str(SCRIPT), *map(str, arguments)]
        return warm.start(all_in_float64, (ranks, words), (to, to), ROOT)


def all_in_float64(ranks: int, words: list[str]) -> int:
    """`loose`, where norms and loss of Transformers' Llama do not round to float32 on their way."""
    from torch import nn
    from transformers.loss.loss_utils import LOSS_MAPPING
    from transformers.models.llama import modeling_llama

    def mean_loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
        labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels)

    modeling_llama.LlamaRMSNorm = nn.RMSNorm
    LOSS_MAPPING["ForCausalLM"] = mean_loss
    return loose(ranks, words)


def gone(group: int, seconds: float) -> bool:
    """Whether all processes of a group end within that time."""
    late = time.monotonic() + seconds
    while time.monotonic() < late:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.gloo
def test_killed_and_gone_on_with_it_is_what_it_would_have_been(tmp_path: Path) -> None:
    import transformers

    whole, first, second = (tmp_path / f"{name}.txt" for name in ("whole", "first", "second"))
    assert code_of(start(4, tmp_path / "whole", whole, "dp_shard=2,tp=2,zero=3"), 120) == 0
    broken = start(4, tmp_path / "broken", first, "dp_shard=2,tp=2,zero=3")
    group = broken.pid
    assert group is not None
    try:
        late = time.monotonic() + 60
        while "step 4 " not in first.read_text() and time.monotonic() < late:
            time.sleep(0.01)
        os.killpg(group, signal.SIGTERM)
        code_of(broken, 60)
        assert gone(group, 60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    assert "SIGTERM: saved step" in first.read_text()
    assert "step 12 " not in first.read_text()
    assert code_of(start(2, tmp_path / "broken", second, "pp=2"), 120) == 0
    wanted, seen = losses_of(whole), losses_of(first, second)
    assert wanted.keys() == seen.keys()
    assert ("12", "loss") in wanted  # two epochs of six batches, the last of each short
    assert max(abs(seen[key] - wanted[key]) for key in wanted) < 1e-12
    models = [
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / name / "weights", dtype="float64")
        for name in ("whole", "broken")
    ]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert float((a - b).detach().abs().max()) < 1e-12
