"""Optimizer state in host memory: the numbers of a plain optimizer, to the bit, and where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.nouns.workload import Workload
from autopar.runtime.pytorch import offload
from autopar.runtime.pytorch.groups import GroupsError
from autopar.runtime.pytorch.offload import check_streams, chunks, step_from_host
from autopar.runtime.pytorch.optimizer import of_groups
from autopar.runtime.pytorch.optimizer_state import optimizer_state, set_steps

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
SHAPES = ((70, 101), (), (1,), (7, 3, 5), (2999,), (2, 2))
CHUNK = 20_000
"""Bytes: some of the parameters are cut, others go together."""


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return of_groups(Workload(model=torch.nn.Identity, batch=dict), groups)


def rprop(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Rprop(groups)  # whose state does not begin with zeros


def made(make: Make) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    draw = torch.Generator().manual_seed(1)
    leaves = [
        torch.nn.Parameter(torch.randn(s, generator=draw, dtype=torch.float64)) for s in SHAPES
    ]
    leaves.append(torch.nn.Parameter(torch.randn(30, 100, generator=draw).to(torch.float64).t()))
    return leaves, make([{"params": leaves[:3], "lr": 0.1}, {"params": leaves[3:], "lr": 0.01}])


def give_gradients(leaves: list[torch.nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for i, leaf in enumerate(leaves):
        missing = (step + i) % 5 == 0  # a parameter that the loss does not reach
        values = torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)
        leaf.grad = None if missing else values


@pytest.mark.parametrize("make", [adamw, rprop])
def test_steps_are_those_of_the_optimizer_to_the_bit(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", CHUNK)
    (plain, usual), (own, streamed) = made(make), made(make)
    if make is adamw:  # as a checkpoint finds it that is loaded before the first step
        for a, b in zip(plain[:4], own, strict=False):
            optimizer_state(usual, a)
            optimizer_state(streamed, b, on_host=True)
    for step in range(4):
        for leaves in (plain, own):
            give_gradients(leaves, step)
        usual.step()
        step_from_host(streamed)
    for a, b in zip(plain, own, strict=True):
        assert torch.equal(a, b)
        assert usual.state[a].keys() == streamed.state[b].keys()
        for name, value in usual.state[a].items():
            assert torch.equal(value, streamed.state[b][name]), name
            assert streamed.state[b][name].device.type == "cpu"
    set_steps(streamed, 7)
    assert [len(group["params"]) for group in streamed.param_groups] == [3, 4]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9000), max_size=8), st.sampled_from([torch.float32, torch.float64]))
def test_chunks_cover_every_element_once_and_are_no_larger(
    sizes: list[int], dtype: torch.dtype
) -> None:
    leaves = [torch.zeros(n, dtype=dtype) for n in sizes]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(offload, "CHUNK_BYTES", CHUNK)
        cut = list(chunks(leaves))
    for chunk in cut:
        assert 0 < sum((p.end - p.first) * p.leaf.element_size() for p in chunk) <= CHUNK
    for leaf in leaves:
        own = [(p.first, p.end) for chunk in cut for p in chunk if p.leaf is leaf]
        ends = [0, *(end for _, end in own)]
        assert ends[-1] == leaf.numel()
        assert [first for first, _ in own] == ends[:-1]


def test_what_breaks_off_loses_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", CHUNK)
    leaves, streamed = made(adamw)
    give_gradients(leaves, 1)
    step_from_host(streamed)
    known = {leaf: [*streamed.state[leaf]] for leaf in leaves if leaf in streamed.state}
    give_gradients(leaves, 2)
    step, calls = streamed.step, 0

    def interrupted() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(streamed, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step_from_host(streamed)
    assert all([*streamed.state[leaf]] == names for leaf, names in known.items())
    assert set(streamed.state) <= set(leaves)
    assert [len(group["params"]) for group in streamed.param_groups] == [3, 4]


def test_hooks_of_a_step_see_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", CHUNK)
    leaves, streamed = made(adamw)
    give_gradients(leaves, 1)
    seen: list[tuple[str, int]] = []

    def count(when: str) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, *_: object) -> None:
            seen.append((when, sum(len(g["params"]) for g in optimizer.param_groups)))

        return hook

    streamed.register_step_pre_hook(count("before"))
    streamed.register_step_post_hook(count("after"))
    step_from_host(streamed)
    assert seen == [("before", 7), ("after", 7)]
    streamed.step()
    assert len(seen) == 4


def test_state_that_lies_otherwise_and_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", CHUNK)
    (plain, usual), (own, streamed) = made(adamw), made(adamw)
    for step in (1, 2):
        for leaves in (plain, own):
            give_gradients(leaves, step)
        for leaf in own:
            for name, value in streamed.state.get(leaf, {}).items():
                if value.ndim == 2:  # as a script may have assigned it
                    streamed.state[leaf][name] = value.t().contiguous().t()
        usual.step()
        step_from_host(streamed)
    assert all(torch.equal(a, b) for a, b in zip(plain, own, strict=True))
    stateless = torch.optim.SGD(own, lr=0.1)
    step_from_host(stateless)
    assert not any(stateless.state.values())


class Own(torch.optim.SGD):
    """Nobody knows what it does with all parameters at once."""


def test_a_scripts_own_optimizer_is_refused() -> None:
    leaf = torch.nn.Parameter(torch.zeros(2, 2))
    check_streams(torch.optim.RMSprop([leaf]))
    with pytest.raises(GroupsError, match=r"take one of torch\.optim, or plan with --fix offload"):
        check_streams(Own([leaf], lr=0.1))
    for other in (torch.optim.LBFGS([leaf]), torch.optim.Adafactor([leaf])):
        with pytest.raises(GroupsError, match=r"does not go by elements, .* --fix offload=none"):
            check_streams(other)
