"""Numbers that every sample of the batch has alike, where a forward asks for them.

Models of images take their sizes as a tensor of the batch (``image_grid_thw``, ``image_sizes``) and
make shapes of them. A trace that was asked for such a number is taken once more, and answers then
with that of the workload's own batch, if all samples have it. The program is that of such batches
alone: its entries say so (`BatchEntry.numbers`), and it checks them at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.overrides import handle_torch_function

from autopar.frontends.pytorch.constant_values import constant_of, made_of
from autopar.torch_private.modes import FakeTensor, without_modes, without_torch_function

LARGEST = 64
"""Numbers of a sample: sizes, not tokens."""


class SameNumbers:
    """Entries of one trace: ``nodes`` by name, ``values`` of the workload's batch, ``whole``: those
    without samples. ``read``: what was asked for."""

    def __init__(
        self,
        nodes: Mapping[str, fx.Node | None],
        values: Callable[[], Mapping[str, torch.Tensor]],
        whole: tuple[str, ...],
    ) -> None:
        self._nodes, self._batch, self._whole = nodes, values, whole
        self.read: dict[str, tuple[int, ...]] = {}
        self.differing = ""
        """What was asked for and differs between samples, in words."""

    @cached_property
    def _rows(self) -> Mapping[fx.Node, tuple[str, torch.Tensor, list[tuple[int, ...]]]]:
        """Name, values and the numbers of each sample, by place in the trace, of those that may be
        sizes."""
        with without_modes(), without_torch_function():
            return {
                node: (name, value, rows)
                for name, value in self._batch().items()
                if (node := self._nodes.get(name)) is not None
                and (rows := self._numbers(name, value))
            }

    @cached_property
    def _alike(self) -> Mapping[fx.Node, tuple[str, torch.Tensor, tuple[int, ...]]]:
        """Name, values and the numbers of every sample, where these are the same."""
        return {n: (name, v, r[0]) for n, (name, v, r) in self._rows.items() if len({*r}) == 1}

    def _numbers(self, name: str, value: torch.Tensor) -> list[tuple[int, ...]]:
        """Those of each sample; nothing where they are no sizes."""
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            return []
        samples = 1 if name in self._whole or not value.dim() else value.shape[0]
        rows = value.reshape(samples, -1)
        small = 0 < rows.shape[-1] <= LARGEST
        return [tuple(row) for row in rows.tolist()] if small else []

    def values(self) -> Mapping[fx.Node, torch.Tensor]:
        """Those of the entries that were read."""
        return {node: v for node, (name, v, _) in self._alike.items() if name in self.read}

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """``tensor`` with values, where it is made from nothing but constants and such entries."""
        batch = {node: value for node, (_, value, _) in self._alike.items()}
        known = constant_of(tensor, batch)
        if known is not None:
            read = (self._alike[node] for node in made_of(tensor, batch))
            self.read |= {name: numbers for name, _, numbers in read}
        else:
            self._note_differing(tensor)
        return known

    def _note_differing(self, tensor: torch.Tensor) -> None:
        every = {node: value for node, (_, value, _) in self._rows.items()}
        for node in made_of(tensor, every):
            name, _, rows = self._rows[node]
            other = next((i for i, row in enumerate(rows) if row != rows[0]), None)
            if other is not None:
                self.differing = (
                    f"; of {name} the first sample has {list(rows[0])}, and sample {other} has "
                    f"{list(rows[other])}"
                )


_answering: ContextVar[SameNumbers | None] = ContextVar("_answering", default=None)


class _Listed:
    """Stands for ``tolist`` in a trace, which layers that are alike call alike; None where it is
    not known."""

    __name__ = "listed"

    def __call__(self, tensor: torch.Tensor) -> Any:
        known = known_of(tensor)
        if known is None:
            return None
        with without_modes(), without_torch_function():
            return known.tolist()


_LISTED = _Listed()


@contextmanager
def answering(numbers: SameNumbers | None) -> Iterator[None]:
    """Inside, `known_of` knows these, and ``tolist`` gives them."""
    kind: Any = FakeTensor
    plain = kind.tolist

    def tolist(tensor: FakeTensor) -> Any:
        known = handle_torch_function(_LISTED, (tensor,), tensor)
        return plain(tensor) if known is None else known

    before = _answering.set(numbers)
    if numbers is not None:
        kind.tolist = tolist
    try:
        yield
    finally:
        kind.tolist = plain
        _answering.reset(before)


def known_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor`` with values; None where it is made from more than constants, and numbers that
    every sample has where those are asked for. Use it `without_modes`."""
    known = constant_of(tensor)
    return asked_of_all(tensor) if known is None else known


def asked_of_all(tensor: torch.Tensor) -> torch.Tensor | None:
    """`known_of` for what no constants are behind alone."""
    numbers = _answering.get()
    return None if numbers is None else numbers.of(tensor)
