"""The slice of its sequences that a rank computes at the moment, and what it keeps of those before.

A stage of a pipeline runs the slices of a sequence one after the other, forward from the first to
the last and backward the other way round (Li et al. 2021, TeraPipe, section 3.2). Forward of a
slice reads keys and values of the slices before it; backward adds to their gradients, which are
whole when their own slice comes.

`at` says which slice runs. Backward may run in another thread, so that holds for the process, which
does one thing at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autopar.runtime.pytorch.portions import Microbatch, shapes_of, weight_of
from autopar.runtime.shared.settings import ProgramError, Settings


@dataclass(slots=True)
class _Pieces:
    """Of one attention, by slice: keys and values in one flat tensor, and the sum of what later
    slices gave to their gradients."""

    pairs: dict[int, Tensor] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Sequences:
    """What a stage keeps of the slices of some sequences, by who computes attention."""

    pieces: dict[Hashable, _Pieces] = field(default_factory=dict)
    called: set[Hashable] = field(default_factory=set)
    """By whom in the forward that runs."""


@dataclass(frozen=True, slots=True)
class _Here:
    sequences: Sequences
    index: int
    count: int
    forward: bool


_running: list[_Here] = []


@contextmanager
def at(sequences: Sequences, index: int, count: int, forward: bool = True) -> Iterator[None]:
    """Inside, slice ``index`` of ``count`` of these sequences runs ``forward``, or back."""
    sequences.called.clear()
    _running.append(_Here(sequences, index, count, forward))
    try:
        yield
    finally:
        _running.pop()


def index() -> int:
    """The slice that runs; 0 where sequences are whole."""
    return _running[-1].index if _running else 0


def count() -> int:
    """Of how many; 1 where sequences are whole."""
    return _running[-1].count if _running else 1


class Earlier:
    """Keys and values of the slices before the one that runs, for one attention.

    A `ring_passing.Carrier`: the own piece comes first, then those before it, the nearest first,
    as far as ``reach`` of them in all.
    """

    def __init__(self, by: Hashable, reach: int) -> None:
        """``by``: which attention it is. Raises `ProgramError` where that ran in this slice before:
        one layer, called twice, has keys of its own for each call."""
        if not _running:
            raise ProgramError(
                "attention of slices outside of a stage that plays them: seq_slices is for "
                "programs of several stages"
            )
        here = _running[-1]
        if here.forward and by in here.sequences.called:
            raise ProgramError(
                "an attention ran twice in one slice: a layer that is called twice would mix up "
                "what it keeps of earlier slices; plan without seq_slices"
            )
        here.sequences.called.add(by)
        self.index, self.reach = here.index, reach
        self._pieces = here.sequences.pieces.setdefault(by, _Pieces())

    def holds(self) -> Tensor | None:
        """The own piece, from its forward on."""
        return self._pieces.pairs.get(self.index)

    def around(self, pair: Tensor, visit: Callable[[Tensor], object]) -> None:
        """``visit`` of each piece. ``pair``: the own one, which is kept from its first forward on;
        a block that runs again makes an equal one."""
        visit(self._pieces.pairs.setdefault(self.index, pair.detach()))
        for before in self._before():
            visit(self._pieces.pairs[before])

    def there_and_back(self, pair: Tensor, visit: Callable[[Tensor], Tensor]) -> Tensor:
        """The gradient of the own piece: what ``visit`` gives for it here, and what it gave in
        later slices. Nothing needs the piece behind that."""
        pairs, sums = self._pieces.pairs, self._pieces.sums
        own = visit(pair)
        for before in self._before():
            part = visit(pairs[before])
            sums[before] = sums[before].add_(part) if before in sums else part
        later = sums.pop(self.index, None)
        pairs.pop(self.index, None)
        return own if later is None else own + later

    def _before(self) -> Iterator[int]:
        return iter(range(self.index - 1, self.index - self.reach, -1))


def in_slices(microbatches: Sequence[Mapping[str, Any]], settings: Settings) -> list[Microbatch]:
    """Each microbatch as ``seq_slices`` in a row, which have their part of dim 1 of sequences and
    all else whole. Raises `ProgramError` where that does not divide."""
    return [_slice(one, i, settings) for one in microbatches for i in range(settings.seq_slices)]


def _slice(microbatch: Mapping[str, Any], i: int, settings: Settings) -> Microbatch:
    ways, entries = settings.seq_slices, dict(microbatch)
    for name in settings.sequences:
        value = entries[name]
        if value.shape[1] % ways:
            raise ProgramError(
                f"batch[{name!r}] has shape {list(value.shape)}; dim 1 must divide into {ways} "
                "slices: give sequences of the length that was planned for, or plan for these"
            )
        length = value.shape[1] // ways
        entries[name] = value.narrow(1, i * length, length).contiguous()
    return Microbatch(entries, weight_of(microbatch), shapes_of(microbatch), i)


def sliced(microbatch: Mapping[str, Any]) -> int:
    """Which slice of its sequences a microbatch has."""
    return microbatch.slice if isinstance(microbatch, Microbatch) else 0
