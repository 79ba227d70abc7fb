"""What a batch or model keeps from call to call is put back, emptied or refused by its name."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autopar.frontends.dispatch import capture
from autopar.frontends.shared.captured import Captured
from autopar.frontends.shared.kept_state import StateError
from autopar.frontends.shared.reachable import is_users
from autopar.nouns import workload
from autopar.nouns.workload import Workload

B, D = 4, 8
HELD: dict[str, Tensor] = {}
ROWS: Any = list(torch.ones(8, D))
GENERATOR = torch.Generator().manual_seed(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).square().mean()
        return loss


class Store:
    """An object, and a class, that keep tensors."""

    shared: dict[str, Tensor] = {}  # noqa: RUF012 (what a user would write)
    __slots__ = ("own",)

    def __init__(self) -> None:
        self.own: Tensor | None = None

    def make(self) -> Tensor:
        self.own = torch.ones(B, D)
        return self.own

    @classmethod
    def make_shared(cls) -> Tensor:
        return cls.shared.setdefault("x", torch.ones(B, D))


def planned(make: Callable[[], Tensor], model: Callable[[], nn.Module] = Net) -> Captured:
    return capture(Workload(model=model, batch=lambda: {"x": make()}))


def refused(make: Callable[[], Tensor], model: Callable[[], nn.Module] = Net) -> str:
    with pytest.raises(StateError) as caught:
        planned(make, model)
    return str(caught.value)


def test_a_global_with_tensors_of_planning() -> None:
    def make() -> Tensor:
        return HELD.setdefault("x", torch.ones(B, D))

    try:
        assert "`HELD` in test_kept_state.py holds a FakeTensor without values" in refused(make)
    finally:
        HELD.clear()


def test_a_closure_a_default_and_attributes_with_tensors_of_planning() -> None:
    kept: list[Tensor] = []
    store, space, later = Store(), SimpleNamespace(x=None), collections.deque[Tensor]()

    def closed() -> Tensor:
        kept.append(torch.ones(B, D))
        return kept[0]

    def default(memo: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006 (what a user would write)
        return memo.setdefault(0, torch.ones(B, D))

    def attribute() -> Tensor:
        attribute.x = torch.ones(B, D)  # type: ignore[attr-defined]
        return torch.ones(B, D)

    def spaced() -> Tensor:
        space.x = torch.ones(B, D)
        return torch.ones(B, D)

    def ended() -> Tensor:
        later.append(torch.ones(B, D))
        return later[0]

    assert "`kept`" in refused(closed)
    assert "`a default of " in refused(default)
    assert "attribute.x`" in refused(attribute)
    assert "`space.x`" in refused(spaced)
    assert "`later`" in refused(ended)
    assert "`store.own`" in refused(lambda: store.make())
    try:
        assert "`Store.shared`" in refused(Store.make_shared)
    finally:
        Store.shared.clear()


def test_tensors_that_stood_there_before_and_real_ones_are_the_users_own() -> None:
    real = torch.ones(B, D)
    kept, empty = {"real": real}, torch.empty(2, device="meta")

    def make() -> Tensor:
        kept["again"] = kept["real"]
        return real if empty.ndim else empty

    assert not planned(make).notes


def test_a_model_that_is_kept() -> None:
    kept: dict[str, nn.Module] = {}

    def model() -> nn.Module:
        if "net" not in kept:
            kept["net"] = Net()
        return kept["net"]

    assert "`kept` in test_kept_state.py holds a Net" in refused(lambda: torch.ones(B, D), model)
    assert not planned(lambda: torch.ones(B, D), model=Net).notes


@pytest.mark.parametrize("wrap", [functools.cache, functools.lru_cache(maxsize=4)])
@pytest.mark.parametrize("reads", [False, True])
def test_a_cache_is_emptied_and_named(wrap: Callable[[Any], Any], reads: bool) -> None:
    @wrap
    def table() -> Any:
        return torch.randint(5, (B, D)).float()

    def make() -> Tensor:
        made: Tensor = table() * float(table().sum()) if reads else table()
        return made

    captured = planned(make)
    assert table.cache_info().currsize == (1 if reads else 0)  # made again, with values
    assert any("cache of table()" in note for note in captured.notes)
    assert type(table()) is Tensor


def test_a_cache_without_tensors_stays() -> None:
    @functools.cache
    def text() -> bytes:
        return b"ab" * D

    def make() -> Tensor:
        return torch.tensor([list(text()[:D])] * B).float()

    assert not planned(make).notes
    assert text.cache_info().currsize == 1


def counted() -> Iterator[Tensor]:
    for i in range(5):
        yield torch.full((B, D), float(i))


def begun() -> Iterator[Tensor]:
    iterator = counted()
    next(iterator)
    return iterator


class Endless:
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Endless:
        return self

    def __next__(self) -> Tensor:
        self.at += 1
        return torch.ones(B, D) * self.at


@pytest.mark.parametrize(
    "start",
    [
        counted,
        begun,
        Endless,
        lambda: iter([torch.ones(B, D)] * 2),
        lambda: iter(DataLoader(ROWS, batch_size=B)),
        lambda: itertools.cycle([torch.ones(B, D)] * 2),
        lambda: map(torch.sqrt, begun()),
        lambda: (x for x in [torch.ones(B, D)] * 2),
        lambda: (x for (x,) in zip(begun(), strict=True)),
        lambda: map(lambda i: torch.ones(B, D) * i, itertools.count()),
    ],
)
def test_an_iterator_that_the_batch_advances(start: Callable[[], Iterator[Tensor]]) -> None:
    source = start()
    message = refused(lambda: next(source))
    assert f"{type(source).__name__} `source` in test_kept_state.py" in message
    assert "inside of batch()" in message


def test_an_iterator_whose_batch_has_to_be_real() -> None:
    def make() -> Tensor:
        x = next(source)
        return x * x.max().item()

    source = iter([torch.ones(B, D)])
    assert "`source`" in refused(make)  # and not that it is exhausted


def test_an_iterator_that_the_batch_makes_and_keeps() -> None:
    store = SimpleNamespace(source=None)

    def make() -> Tensor:
        if store.source is None:
            store.source = counted()
        return next(store.source)  # type: ignore[no-any-return]

    assert "`store.source`" in refused(make)


@pytest.mark.parametrize("mode", ["r", "rb"])
@pytest.mark.parametrize("take", ["read", "readline", "__next__"])
def test_an_open_file(tmp_path: Path, mode: str, take: str) -> None:
    path = tmp_path / "text"
    path.write_text("abcdefgh\n" * 9)
    with path.open(mode) as file:

        def make() -> Tensor:
            return torch.full((B, D), float(len(getattr(file, take)())))

        message = refused(make)
    assert "the open file `file` in test_kept_state.py" in message
    assert "with open(path) as file" in message


def test_what_is_made_in_the_batch_or_not_touched_is_fine(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abcdefgh")
    loader: Any = DataLoader(ROWS, batch_size=B, shuffle=True)
    other = iter([1, 2])

    def make() -> Tensor:
        assert other is not None
        with (tmp_path / "text").open() as file:
            file.read()
        return next(iter(loader))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    want = make()
    torch.manual_seed(0)
    assert not planned(make).notes
    assert torch.equal(make(), want)


def test_random_states_are_put_back() -> None:
    own, numpys, old = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)

    def draw() -> Tensor:
        sizes = [random.random(), own.random(), np.random.rand(), numpys.random(), old.rand()]
        drawn = torch.rand(B, generator=GENERATOR).tolist() + torch.rand(B).tolist()
        return torch.tensor([sizes + drawn[: D - 5]] * B)

    before: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    again = torch.Generator().manual_seed(0)
    expected = [random.Random(0).random(), float(np.random.default_rng(0).random())]
    planned(draw)
    after: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    assert before[0] == after[0]
    assert all(map(np.array_equal, before[1], after[1]))
    assert torch.equal(before[2], after[2])
    assert [own.random(), numpys.random()] == expected
    assert torch.equal(GENERATOR.get_state(), again.get_state())
    assert old.rand() == np.random.RandomState(0).rand()


def jax_planned(batch: Callable[[], Any], scale: Callable[[], Any] = lambda: 1.0) -> Captured:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ params["w"] * scale()) ** 2)

    def init(key: Any) -> Any:
        return {"w": jax.random.normal(key, (D, D))}

    return capture(Workload(loss=loss, init=init, batch=batch))


def test_jax_iterators_caches_and_variables() -> None:
    source = iter([np.ones((B, D), "float32")] * 2)
    kept: list[Any] = []

    @functools.cache
    def cached() -> Any:
        return jnp.arange(D) * 1.0

    def keeping() -> Any:
        kept.append(jnp.ones(D) * 2)
        return kept[-1]

    def batch() -> Any:
        return {"x": np.ones((B, D), "float32")}

    with pytest.raises(StateError, match="list_iterator `source`"):
        jax_planned(lambda: {"x": next(source)})
    assert any("cache of cached()" in note for note in jax_planned(batch, cached).notes)
    assert not isinstance(cached(), jax.core.Tracer)
    with pytest.raises(StateError, match=r"`kept` in test_kept_state.py holds a .*Tracer"):
        jax_planned(batch, keeping)
    assert not jax_planned(batch).notes


def test_whose_a_file_is() -> None:
    assert is_users(__file__)
    assert not any(map(is_users, (workload.__file__, np.__file__, random.__file__)))
    elsewhere = ("/opt/other/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages")
    assert not any(is_users(f"{folder}/jax/numpy.py") for folder in elsewhere)
