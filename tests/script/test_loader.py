"""What a loader gives to each data rank, and where it goes on; no processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.loader import Loader

DATA = [{"x": torch.tensor(i)} for i in range(23)]


def batches(width: int, samples: int, **options: Any) -> list[list[list[int]]]:
    """The samples of each batch, by data rank."""
    loaders = [Loader(DATA, samples, place, width, **options) for place in range(width)]
    return [
        [batch["x"].tolist()[: batch.rows] for batch in together]
        for together in zip(*loaders, strict=True)
    ]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.booleans())
def test_data_ranks_share_what_one_would_have(width: int, samples: int, shuffle: bool) -> None:
    options = {"shuffle": shuffle, "seed": 4}
    for one, several in zip(batches(1, samples, **options), batches(width, samples, **options),
                            strict=True):  # fmt: skip
        assert [*chain(*several)] == one[0]
        assert max(map(len, several)) - min(map(len, several)) <= 1


def test_every_sample_once_an_epoch_and_epochs_in_other_orders() -> None:
    loader = Loader(DATA, 8, 0, 1, shuffle=True)
    epochs = [[i for batch in loader for i in batch["x"].tolist()] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(23))
    assert epochs[0] != epochs[1]
    assert [batch.samples for batch in Loader(DATA, 8, 0, 1)] == [8, 8, 7]
    assert [batch.samples for batch in Loader(DATA, 8, 0, 1, drop_last=True)] == [8, 8]


def test_a_rank_without_samples_gets_one_that_does_not_count() -> None:
    *_, last = Loader(DATA[:5], 4, 1, 2)
    assert (last.rows, last.samples, len(last["x"])) == (0, 1, 1)


@pytest.mark.parametrize("taken", [0, 2, 3, 4])
def test_it_goes_on_where_it_was_under_another_number_of_ranks(taken: int) -> None:
    options: dict[str, Any] = {"shuffle": True, "num_workers": 0}
    first = Loader(DATA, 8, 0, 1, **options)
    whole = [batch["x"].tolist() for _ in range(3) for batch in first]
    torch.manual_seed(0)
    drawn = torch.get_rng_state()
    again = Loader(DATA, 8, 0, 1, **options)
    seen: list[list[int]] = []
    while len(seen) < taken:
        for batch in again:
            seen.append(batch["x"].tolist())
            if len(seen) == taken:
                state = again.state_dict()
                break
    else:
        state = again.state_dict() if not taken else state
    assert torch.equal(torch.get_rng_state(), drawn)  # the model's draws are its own
    parts = [Loader(DATA, 8, place, 2, **options) for place in range(2)]
    for part in parts:
        part.load_state_dict(state)
    rest: list[list[int]] = []
    while len(rest) < len(whole) - taken:
        for together in zip(*parts, strict=True):
            rest.append([*chain(*(b["x"].tolist()[: b.rows] for b in together))])
    assert seen + rest == whole


def test_what_cannot_be_split_is_said() -> None:
    class Endless(IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(DATA)

    with pytest.raises(UserError, match=r"call trainer\.step\(batch, local=True\)"):
        Loader(Endless(), 8, 0, 1)
    with pytest.raises(UserError, match=r"batch_sampler=.*decides that"):
        Loader(DATA, 8, 0, 1, batch_sampler=[])
    with pytest.raises(UserError, match="23 samples, fewer than one batch of 40"):
        Loader(DATA, 40, 0, 1, drop_last=True)
    with pytest.raises(UserError, match="a batch is a dict"):
        next(iter(Loader([1, 2, 3], 2, 0, 1)))
    with pytest.raises(UserError, match="length 23, this one has 22"):
        Loader(DATA[:22], 8, 0, 1).load_state_dict(Loader(DATA, 8, 0, 1).state_dict())
