"""Initial weights are bit for bit those of the original constructor, piece by piece."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import nn

from autopar.frontends.pytorch import capture
from autopar.runtime.pytorch.initialize import Target, initialize
from autopar.runtime.pytorch.recording import named_tensors
from autopar.runtime.shared.settings import ProgramError
from tests.runtime import tiny_gpt

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "vocab_size": 101,
}


class Copied(nn.Module):
    """A stem with norms and what copies make of layers: norms count in tensors that stand for real
    ones under fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3
        )
        block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(3))


class Shares(nn.Module):
    """Two buffers of one memory are copied together."""

    def __init__(self) -> None:
        super().__init__()
        pair = nn.Module()
        first = torch.rand(4)
        pair.register_buffer("first", first)
        pair.register_buffer("second", first[1:])
        self.weight = nn.Parameter(torch.rand(4))
        self.copied = copy.deepcopy(pair)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_layer=2, n_embd=48, n_head=4, vocab_size=101, bos_token_id=0, eos_token_id=0
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **SMALL)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            num_layers=2, d_model=48, d_ff=96, num_heads=4, d_kv=12, vocab_size=101,
            decoder_start_token_id=0,
        )
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(
            num_hidden_layers=2, hidden_size=48, intermediate_size=96, num_attention_heads=4,
            image_size=32, patch_size=8,
        )
    ),
    "resnet": lambda: hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2])
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SMALL)
    ),
    "transformer": lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True),
    "lstm": lambda: nn.LSTM(16, 16, 2),
    "copied": Copied,
}  # fmt: skip


def targets(whole: dict[str, torch.Tensor], part: int) -> dict[str, Target]:
    """The first or second half of every dim, or everything."""
    by_name = {}
    for name, tensor in whole.items():
        halves = [(slice(0, n), slice(0, n // 2 or n), slice(n // 2, n)) for n in tensor.shape]
        region = tuple(half[part] for half in halves)
        by_name[name] = Target(torch.zeros_like(tensor[region]), region)
    return by_name


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_equal_the_original(family: str) -> None:
    make = FAMILIES[family]
    torch.manual_seed(3)
    whole = {name: t.detach() for name, t in named_tensors(make())}
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    for part in range(3):
        wanted = targets(whole, part)
        assert initialize(make, 3, wanted) is None
        for name, target in wanted.items():
            assert torch.equal(target.tensor, whole[name][target.region]), name
    torch.manual_seed(3)
    make()
    assert torch.equal(torch.get_rng_state(), drawn)


def test_random_state_of_the_caller_stays() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    initialize(lambda: nn.Linear(3, 3), 0, {})
    assert torch.equal(before, torch.get_rng_state())


class Reads(nn.Module):
    """Its shape depends on a random value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(int(torch.randint(3, 9, ()))))


class Seeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.weight = nn.Parameter(torch.rand(4))


class Generates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Reads, "_local_scalar_dense"),
        (Seeds, "sets the state"),
        (Generates, "own"),
        (Shares, "share memory"),
    ],
)
def test_what_cannot_be_replayed_is_built_whole_and_said(make: type[nn.Module], why: str) -> None:
    torch.manual_seed(1)
    weight = make().weight
    assert isinstance(weight, torch.Tensor)
    whole = weight.detach()
    target = Target(torch.zeros(2), (slice(1, 3),))
    reason = initialize(make, 1, {"weight": target})
    assert reason is not None
    assert why in reason
    assert torch.equal(target.tensor, whole[1:3])


class Views(nn.Module):
    """Parameters that share a storage, are written through views, and hold given values."""

    def __init__(self) -> None:
        super().__init__()
        fused = torch.randn(6, 4)
        fused[1::2].mul_(2)
        fused[0].copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.first = nn.Parameter(fused[:3])
        self.second = nn.Parameter(fused[3:].t())
        self.register_buffer("table", torch.arange(6).float().outer(torch.linspace(0, 1, 4)).sin())
        self.plain = torch.full((3,), 0.5).cumsum(0)
        nn.init.trunc_normal_(self.second, std=0.5, a=-0.6, b=0.6)


def test_views_constants_and_attributes() -> None:
    torch.manual_seed(4)
    whole = {name: t.detach() for name, t in named_tensors(Views())}
    assert set(whole) == {"first", "second", "table", "plain"}
    wanted = targets(whole, 2)
    assert initialize(Views, 4, wanted) is None
    for name, target in wanted.items():
        assert torch.equal(target.tensor, whole[name][target.region]), name


def test_a_name_that_the_model_lacks_is_named() -> None:
    wanted = {"bias2": Target(torch.zeros(3), (slice(0, 3),))}
    with pytest.raises(ProgramError, match="bias2"):
        initialize(lambda: nn.Linear(3, 3), 0, wanted)


def test_a_shape_that_does_not_fit_is_named() -> None:
    wanted = {"bias": Target(torch.zeros(4), (slice(0, 4),))}
    with pytest.raises(ProgramError, match=r"bias has shape \[3\]"):
        initialize(lambda: nn.Linear(3, 3), 0, wanted)


FRESH = """
import resource, torch
from torch import nn
from autopar.runtime.pytorch.initialize import Target, initialize
make = lambda: nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32)))
targets = {f"{i}.weight": Target(torch.empty(32, 1024), (slice(0, 32), slice(0, 1024)))
           for i in range(32)}
initialize(lambda: nn.Linear(2, 2), 0, {})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert initialize(make, 0, targets) is None
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
from autopar.frontends.pytorch import capture
from tests.runtime import tiny_gpt
print(hash("tp"), capture(tiny_gpt.workload).fingerprint())
"""


@pytest.fixture(scope="module")
def fresh() -> list[str]:
    """What `FRESH` prints in an interpreter of its own, whose strings have other hashes."""
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": other_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


def test_the_whole_model_is_never_in_memory(fresh: list[str]) -> None:
    """32 matrices of 4 MiB each, of which a 32nd is kept: 4 MiB, and a few while they are made."""
    assert int(fresh[0]) < 40 * 1024  # KiB; the whole model has 128 MiB


def test_a_capture_does_not_depend_on_the_hashes_of_strings(fresh: list[str]) -> None:
    _, hashed, fingerprint = fresh
    assert int(hashed) != hash("tp")
    assert fingerprint == capture(tiny_gpt.workload).fingerprint()
