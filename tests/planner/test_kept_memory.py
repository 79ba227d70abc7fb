"""What recomputations keep of a forward pass, against what PyTorch holds when backward begins."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from autopar.emit.pytorch import emit
from autopar.files.cluster_file import cluster_from_text
from autopar.frontends.dispatch import capture
from autopar.nouns.recompute import POLICIES, SELECTIVE, Recompute
from autopar.nouns.workload import Workload
from autopar.planner.planning import PlanResult, plan_captured
from autopar.pricing.prices import Prices
from autopar.pricing.summary import summarise
from autopar.runtime.pytorch import recomputing
from autopar.runtime.pytorch.initialize import initialize
from autopar.runtime.pytorch.recomputing import recomputations
from autopar.runtime.pytorch.recomputing import recompute as again
from autopar.runtime.pytorch.training.program import Program
from autopar.runtime.pytorch.training.trainer import Trainer
from autopar.runtime.verify.recomputed import differences
from autopar.torch_private.modes import TorchDispatchMode
from tests.runtime.live_memory import LiveMemory

ONE = cluster_from_text(
    "groups: [{device: A100, count: 1}]\n"
    "levels: [{name: alone, span: 1, bandwidth: 1 GB/s, latency: 1 us}]"
)
MIXED = ("compute x 1 + selective-op", "full x 2 + selective-op")
BATCH, LENGTH, WIDTH, HEADS, LAYERS, WORDS = 2, 64, 32, 4, 3, 61


class Block(nn.Module):
    """``written``: attention is, product by product; else it is PyTorch's own."""

    def __init__(self, written: bool, dropped: float) -> None:
        super().__init__()
        self.written = written
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropped)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            part.view(b, s, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(WIDTH, dim=2)
        )
        if self.written:
            scores = torch.matmul(q, k.transpose(2, 3)) * (WIDTH // HEADS) ** -0.5
            mixed = torch.matmul(F.softmax(scores, dim=-1), v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        y: Tensor = x + self.drop(self.down(F.gelu(self.up(self.after(x)))))
        return y


class Model(nn.Module):
    def __init__(self, written: bool = False, dropped: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(written, dropped) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def batch(_: int = 0) -> dict[str, Tensor]:
    return {"words": torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % WORDS}


class Ran(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How often each op ran, by its name without the namespace."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func).partition(".")[2].partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def planned(recompute: str, make: Callable[[], nn.Module]) -> tuple[Workload, PlanResult, str]:
    workload = Workload(model=make, batch=batch, seed=0)
    captured = capture(workload)
    made = plan_captured(captured, workload, ONE, "m.py:M", {"recompute": "none"})
    stages = (replace(made.plan.stages[0], recompute=Recompute.parse(recompute)),)
    made = replace(made, plan=replace(made.plan, stages=stages))
    return workload, made, emit(made.lowered, made.plan, captured, True)["model.py"]


def trainer_of(
    recompute: str,
    written: bool = False,
    dropped: float = 0.0,
    make: Callable[[], nn.Module] | None = None,
) -> tuple[Trainer, PlanResult]:
    make = make or partial(Model, written, dropped)
    workload, made, text = planned(recompute, make)
    module = types.ModuleType("emitted")
    exec(compile(text, "emitted/model.py", "exec"), module.__dict__)
    return Trainer(Program.of(module), workload, lambda t: initialize(make, 0, t)), made


def held_bytes(trainer: Trainer) -> int:
    """When backward begins."""
    seen: list[int] = []
    backward = torch.autograd.backward

    def begin(*args: Any, **kwargs: Any) -> None:
        seen.append(memory.now)
        backward(*args, **kwargs)

    with LiveMemory() as memory, patch("torch.autograd.backward", begin):
        trainer.backward(batch())
    (most,) = seen
    return most


@pytest.mark.parametrize("written", [False, True], ids=["fused", "written"])
@pytest.mark.parametrize("recompute", [*POLICIES, *MIXED])
@pytest.mark.some(6)
def test_bytes_kept_are_those_that_are_held(recompute: str, written: bool) -> None:
    trainer, made = trainer_of(recompute, written)
    prices = Prices(ONE, made.lowered.mesh, made.plan.precision)
    kept = summarise(made.lowered, prices).life(Recompute.parse(recompute)).saved
    assert kept == pytest.approx(held_bytes(trainer), rel=0.01)


class Folded(nn.Module):
    """A transposed convolution, and a matrix on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)
        self.mix = nn.Parameter(torch.eye(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.matmul(self.mix, F.gelu(self.up(x.transpose(1, 2)).transpose(1, 2)))
        return x + F.gelu(y)


class Uneven(nn.Module):
    """Large blocks before small ones, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.large = nn.ModuleList(Block(False, 0.0) for _ in range(2))
        self.folded = nn.ModuleList(Folded() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in (*self.large, *self.folded):
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


@pytest.mark.parametrize("recompute", [*POLICIES, "compute x 3 + selective-op", *MIXED])
def test_bytes_kept_of_blocks_of_two_kinds(recompute: str) -> None:
    trainer, made = trainer_of(recompute, make=Uneven)
    summary = summarise(made.lowered, Prices(ONE, made.lowered.mesh, made.plan.precision))
    life = summary.life(Recompute.parse(recompute))
    assert life.saved == pytest.approx(held_bytes(trainer), rel=0.01)


@pytest.mark.parametrize(
    "keep",
    [
        {},
        {"keep_collectives": True},
        {"keep_products": True},
        {"keep_routes": True},
        {"keep_products": True, "keep_routes": True},
    ],
)
def test_what_recomputes_compiles(keep: dict[str, Any]) -> None:
    block, x = Block(False, 0.0), torch.randn(BATCH, LENGTH, WIDTH)

    def loss(x: Tensor) -> Tensor:
        made: Tensor = again(block, x, **keep).sum()
        return made

    torch.autograd.backward(torch.compile(loss, backend="aot_eager", fullgraph=True)(x))
    compiled = [p.grad for p in block.parameters()]
    block.zero_grad()
    torch.autograd.backward(loss(x))
    for one, other in zip(compiled, block.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)


def test_attention_that_drops_is_run_again() -> None:
    """Kept, it would not draw again, and dropout behind it would draw its numbers."""
    (flash, place), *_ = recomputing._ATTENTION.items()
    plain: list[object] = [None] * place
    for given, named in (([*plain, 0.1], {}), (plain, {"dropout_p": 0.1})):
        assert recomputing._products(None, flash, *given, **named) is not CheckpointPolicy.MUST_SAVE
    for given, named in (([*plain, 0.0], {}), (plain, {})):
        assert recomputing._products(None, flash, *given, **named) is CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_every_recomputation_gives_the_same_gradients(dropped: float) -> None:
    def gradients(recompute: str) -> list[Tensor]:
        trainer, _ = trainer_of(recompute, dropped=dropped)
        trainer.backward(batch())
        return [held.leaf.grad for held in trainer.held if held.leaf.grad is not None]

    plain = gradients("none")
    for recompute in (*POLICIES[1:], *MIXED):
        for one, other in zip(plain, gradients(recompute), strict=True):
            assert torch.equal(one, other)


def test_selective_recomputation_runs_products_once() -> None:
    ran = {}
    for recompute in ("none", SELECTIVE, "full"):
        trainer, _ = trainer_of(recompute)
        with Ran() as seen:
            trainer.backward(batch())
        ran[recompute] = seen.ops
    for name in ("mm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert ran[SELECTIVE][name] == ran["none"][name] < ran["full"][name]
    for name in ("native_layer_norm", "gelu"):
        assert ran[SELECTIVE][name] == ran["full"][name] == 2 * ran["none"][name]


@pytest.mark.parametrize("recompute", [*POLICIES, *MIXED])
def test_what_a_program_recomputes_is_compared_with_its_plan(recompute: str) -> None:
    trainer, made = trainer_of(recompute)
    with recomputations() as seen:
        trainer.backward(batch())
    assert differences(made.plan, made.graph, 0, seen) == []
    for other in (*POLICIES, *MIXED):
        stages = (replace(made.plan.stages[0], recompute=Recompute.parse(other)),)
        lines = differences(replace(made.plan, stages=stages), made.graph, 0, seen)
        assert bool(lines) == (other != recompute)
        assert all(f"its plan says {other}" in line for line in lines)


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_local_experts=4,
        use_cache=False,
    )
    return WithLabels(transformers.MixtralForCausalLM(config))


class WithLabels(nn.Module):
    """Words as labels, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=words, labels=words).loss
        return loss


@pytest.mark.parametrize("recompute", [*POLICIES, *MIXED])
@pytest.mark.some(3)
def test_bytes_kept_of_experts(recompute: str) -> None:
    trainer, made = trainer_of(recompute, make=_mixtral)
    prices = Prices(ONE, made.lowered.mesh, made.plan.precision)
    kept = summarise(made.lowered, prices).life(Recompute.parse(recompute)).saved
    assert kept == pytest.approx(held_bytes(trainer), rel=0.01)


def test_routes_are_found_once_whatever_recomputes() -> None:
    ran = {}
    for recompute in POLICIES:
        trainer, _ = trainer_of(recompute, make=_mixtral)
        with Ran() as seen:
            trainer.backward(batch())
        ran[recompute] = seen.ops
    assert {ops["topk"] for ops in ran.values()} == {LAYERS}
    assert ran[SELECTIVE]["mm"] == ran["none"]["mm"] < ran["full"]["mm"]
