"""A `DataLoader` of each data rank's own part of every global batch, which goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autopar.nouns.errors import UserError
from autopar.runtime.pytorch.loader_workers import Workers
from autopar.runtime.pytorch.portions import LocalBatch, even_split

OURS = ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last", "generator")


class LoaderError(UserError):
    """A data set or state that a loader cannot go through."""


class Loader:
    """Iterating gives the batches of one epoch as `LocalBatch`; `len` is their number.

    Epoch e is one order of the data set, the same on all ranks and under every plan: by ``shuffle``
    a permutation drawn from ``seed`` and e. Batch b is ``samples`` of it in a row, of which this
    data rank reads its own part. ``state_dict`` says which batches were given; after
    ``load_state_dict`` the next iteration goes on behind them. An iteration that was left early is
    not taken up again: the next one is another epoch.
    """

    def __init__(
        self,
        dataset: Any,
        samples: int,
        place: int,
        width: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        between: Callable[[Loader], None] = lambda loader: None,
        **options: Any,
    ) -> None:
        """``between`` is called with this when a batch is done with; ``options`` are those of
        `DataLoader`: ``num_workers``, ``collate_fn``, ``prefetch_factor`` and so on."""
        for name in OURS:
            if name in options:
                raise LoaderError(f"loader({name}=...): the split over data ranks decides that")
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise LoaderError(
                f"loader({type(dataset).__name__}): a data set without length has no order to "
                "split; go through it with a DataLoader of your own on each data rank "
                "(trainer.data_rank of trainer.data_size) and call trainer.step(batch, local=True)"
            )
        if samples < 1:
            raise LoaderError(f"loader(batch_size={samples}): at least one sample is needed")
        self.dataset, self.samples, self.place, self.width = dataset, samples, place, width
        self.shuffle, self.seed, self.drop_last, self.options = shuffle, seed, drop_last, options
        self.epoch, self.given = 0, 0
        self._goes_on = False
        self._between = between
        if len(self) == 0:
            raise LoaderError(
                f"loader: the data set has {len(dataset)} samples, fewer than one batch of "
                f"{samples}: give drop_last=False or more samples"
            )

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.samples)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[LocalBatch]:
        if self.given and not self._goes_on:
            self.epoch, self.given = self.epoch + 1, 0
        self._goes_on = False
        order = self._order()
        numbers = range(self.given, len(self))
        parts = [self._part(order, number) for number in numbers]
        workers = Workers(self.options.get("worker_init_fn"), self.options.get("num_workers", 0))
        try:
            read = self._read([indices for indices, _, _ in parts], workers)
            yield from self._given(numbers, parts, read)
        finally:
            workers.end()

    def _read(self, batches: list[list[int]], workers: Workers) -> Iterator[Any]:
        """What the data set makes of ``batches`` of indices, read by ``workers`` if by any."""
        several = self.options.get("num_workers", 0)
        own = {"worker_init_fn": workers} if several else {}

        def reader() -> DataLoader[Any]:
            return DataLoader(
                self.dataset,
                batch_sampler=batches,
                generator=torch.Generator().manual_seed(self.seed),  # not the model's draws
                **{**self.options, **own},
            )

        return workers.start(reader) if several else iter(reader())

    def _given(
        self, numbers: range, parts: list[tuple[list[int], int, int]], reads: Iterator[Any]
    ) -> Iterator[LocalBatch]:
        for number, (_, rows, samples), read in zip(numbers, parts, reads, strict=True):
            if not isinstance(read, Mapping):
                raise LoaderError(
                    f"the data set's samples make a {type(read).__name__}: a batch is a dict by "
                    "the names of forward's arguments; let samples be dicts, or give collate_fn"
                )
            self.given = number + 1
            place = (self.epoch, number)
            if self.given == len(self):
                self.epoch, self.given = self.epoch + 1, 0
            yield LocalBatch(read, rows, samples, place, self)
            self._between(self)

    def _order(self) -> list[int] | range:
        count = len(self.dataset)
        if not self.shuffle:
            return range(count)
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order: list[int] = torch.randperm(count, generator=draw).tolist()
        return order

    def _part(self, order: list[int] | range, number: int) -> tuple[list[int], int, int]:
        """Indices that this rank reads of a batch, how many count, and of how many."""
        whole = order[number * self.samples : (number + 1) * self.samples]
        mine = even_split(len(whole), self.width, self.place)
        own = list(whole[mine.start : mine.stop])
        return own or [whole[0]], len(own), len(whole)

    def state_dict(self) -> dict[str, int]:
        return {
            "epoch": self.epoch,
            "given": self.given,
            "samples": self.samples,
            "length": len(self.dataset),
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Raises `LoaderError` for the state of a loader that went through other batches."""
        own = self.state_dict()
        for name in ("length", "samples", "seed"):
            if state[name] != own[name]:
                raise LoaderError(
                    f"the loader's state was saved with {name} {state[name]}, this one has "
                    f"{own[name]}: the batches that were taken would not be those. Give it the "
                    "same data set, batch size and seed"
                )
        self.epoch, self.given = state["epoch"], state["given"]
        self._goes_on = True
