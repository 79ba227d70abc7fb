"""Programs whose MLPs run in chunks of tokens: loss and gradients of simulated ranks beside the
model's in float64 under random decisions, and the text that a person reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.shared.captured import Captured
from autopar.nouns.mesh import Mesh
from autopar.nouns.plan import Spread
from autopar.rules.feed_forwards import with_mlp_chunks
from tests.emit.harness import Emitted, capture_of, check, emitted
from tests.emit.random_stage import random_stage
from tests.emit.test_tp_pieces import Stack, batch, captured_stack


def cut(captured: Captured, spread: Spread, chunks: int, **how: Any) -> Emitted:
    graph = with_mlp_chunks(captured.graph, chunks)
    return emitted(replace(captured, graph=graph), spread, mlp_chunks=chunks, **how)


@pytest.mark.parametrize("recompute", ["none", "selective-op", "full"])
def test_under_random_decisions(recompute: str) -> None:
    torch.manual_seed(0)
    own, given = Stack(), batch()
    captured = captured_stack()
    joined = replace(captured, graph=with_mlp_chunks(captured.graph, 1))
    split = 0
    for mesh, microbatches in (("tp=4", 1), ("dp_shard=2 x tp=2", 2), ("tp2=2 x tp=2", 1)):
        for seed in range(3):
            chunks = (1, 2, 5)[seed]
            spread = random_stage(joined, Mesh.parse(mesh), microbatches, seed)
            program = cut(captured, spread, chunks, microbatches=microbatches, recompute=recompute)
            assert program.text.count(f"chunks={chunks}") == 2
            check(program, own, given, issued=recompute == "none")
            parts = [
                op for op in program.lowered.blocks["Layer"].ops if op.op.kind == "feed_forward"
            ]
            split += sum(bool(op.strategy.choices) for op in parts)
    assert split > 1


def test_lines_that_a_person_reads() -> None:
    captured = captured_stack()
    text = cut(captured, Spread(Mesh.parse("dp_replicate=2")), 4).text
    for line in (
        "h = feed_forward(h, (self.up,), local(self.down.weight), gate=between_products, chunks=4)",
        "`feed_forward`              an MLP in chunks of tokens; backward makes what `gate` reads",
        "x = x + (h + local(self.down.bias))",
        "h, (self.gate, self.value), local(self.out.weight), gate=between_products2, chunks=4",
        "    return F.silu(gate) * up",
    ):
        assert line in text, text


class Reread(nn.Module):
    """What its first product gives is read again behind what is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        skip, r = h.tanh(), F.relu(h)
        return F.mse_loss(self.c(r * r + skip), y)


def test_a_name_is_taken_again_only_where_nothing_reads_it_any_more() -> None:
    torch.manual_seed(0)
    given = {"x": torch.randn(4, 6, 8), "y": torch.randn(4, 6, 8)}
    captured = capture_of(Reread, lambda: given)
    program = cut(captured, Spread(Mesh.parse("dp_replicate=2")), 2)
    check(program, Reread(), given)
