"""Kernels that a graph's ops run by: where they may, and that programs compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.nouns.mesh import Mesh
from autopar.rules.implementations.kernels import GATED, kernels_of
from autopar.rules.kernels import kernels_in, only_kernels, sites, with_kernels, wrong_kernels
from tests.emit.harness import capture_of, check, emitted
from tests.emit.random_stage import random_stage

BATCH, WORDS, WIDTH, HEADS = 4, 8, 8, 4
Between = Callable[[Any, Tensor, Tensor], Tensor]
ATTENTION, GATE = "attention by cudnn", "gated_activation by triton"


class Model(nn.Module):
    """``between``: of what the gate and up give."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.between = between
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in "qkv")
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in "gud")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.down(self.between(self, self.gate(x), self.up(x)))
        return x.square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, WORDS, WIDTH, generator=torch.Generator().manual_seed(0))}


def _silu(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _turned(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    return up * F.silu(gate)


def _tanh(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _both(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * F.silu(up)


def _halves(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    one, other = torch.cat((gate, up), -1).chunk(2, -1)
    return F.silu(one) * other


@pytest.mark.parametrize("between", [_silu, _turned, _tanh, _both, _halves])
def test_programs_compute_the_same(between: Between) -> None:
    torch.manual_seed(0)
    own = Model(between)
    captured = capture_of(partial(Model, between), batch)
    by = {"attention": ATTENTION, GATED: GATE}
    kernels = {site.key: by[site.op.kind] for site in sites(captured.graph)}
    assert sorted(kernels.values()) == [ATTENTION, GATE]
    made = replace(captured, graph=with_kernels(captured.graph, kernels))
    assert kernels_in(made.graph) == kernels
    plain = 0
    for mesh, microbatches in (("tp=4", 1), ("dp_shard=2 x tp=2", 2), ("tp2=2 x tp=2", 1)):
        for seed in range(3):
            spread = random_stage(made, Mesh.parse(mesh), microbatches, seed)
            program = emitted(made, spread, microbatches)
            assert 'kernel="triton"' in program.text
            assert ("rows=" in program.text) == ('kernel="cudnn"' not in program.text)
            plain += 'kernel="cudnn"' in program.text
            check(program, own, batch())
    assert plain, "every spread splits attention's rows"


def test_rows_that_are_split_run_by_calls_of_their_own() -> None:
    captured = capture_of(partial(Model, _silu), batch)
    (where,) = (s.key for s in sites(captured.graph) if s.op.kind == "attention")
    graph = with_kernels(captured.graph, {where: ATTENTION})
    assert kernels_in(only_kernels(graph, {})) == {}
    assert only_kernels(graph, {where: ATTENTION}) == graph
    assert only_kernels(graph, {}) == captured.graph


def _read_twice(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    gated = F.silu(gate)
    return gated * up + gated


def _erf(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def _broadcast(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up.mean(-1, keepdim=True)


def _by_a_number(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * 2 + up


def _cast_between(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).double() * up.double()


@pytest.mark.parametrize("between", [_read_twice, _erf, _broadcast, _by_a_number, _cast_between])
def test_what_is_no_gated_activation_stays_as_it_is(between: Between) -> None:
    graph = capture_of(partial(Model, between), batch).graph
    assert [s.op.kind for s in sites(graph)] == ["attention"]


def test_a_plan_names_only_what_can_run_there() -> None:
    graph = capture_of(partial(Model, _silu), batch).graph
    at = {s.kind: s.key for s in sites(graph)}
    assert not list(wrong_kernels(graph, {at[GATED]: GATE}))
    ((_, why),) = wrong_kernels(graph, {at["attention"]: "attention by flash"})
    assert "the op reads float32" in why
    for where, text in (
        (at["attention"], GATE),
        (at["attention"], "attention by oracle"),
        (at[GATED], ATTENTION),
        ("down/add", GATE),
    ):
        ((wrong, may),) = wrong_kernels(graph, {where: text})
        assert wrong == where
        assert ("no kernel" in may) == (where == "down/add")


def test_the_table_says_what_each_kernel_cannot() -> None:
    captured = capture_of(partial(Model, _silu), batch)
    (site,) = (s for s in sites(captured.graph) if s.op.kind == "attention")
    tensors = {n: replace(t, dtype="bfloat16") for n, t in site.part.tensors.items()}
    reasons = {k.name: k.computes(site.op, tensors) for k in kernels_of("attention")}
    assert set(reasons) == {"flash", "cudnn", "flash3", "flash4"}
    assert all("multiples of 8" in reason for reason in reasons.values())  # heads of two numbers
    for name, value in (("window", 4), ("documents", True), ("sinks", True)):
        op = replace(site.op, attrs={**site.op.attrs, name: value})
        assert all(name.rstrip("s") in k.computes(op, tensors) for k in kernels_of("attention"))
    assert "computes in bfloat16 or float16" in kernels_of("attention")[0].computes(
        site.op, site.part.tensors
    )
