"""What an op keeps for its backward pass, and rows that it routes: parts of a rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.nouns.imbalance import busiest_rank

_GROUPS = (list, tuple, set, frozenset, range)


def _as_tuple(value: Any) -> Any:
    """Lists, sets and ranges as tuples, also inside of one another; anything else as it is."""
    if isinstance(value, _GROUPS):
        return tuple(map(_as_tuple, value))
    return value


class TupleRecord:
    """A frozen record that holds tuples where its maker gave lists: records are looked up."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, _GROUPS):
                object.__setattr__(self, name, _as_tuple(value))


@dataclass(frozen=True, slots=True)
class Kept(TupleRecord):
    """A tensor that the op makes for its own backward pass, neither operand nor result.

    It has the extents of ``dims`` (factor names) and takes ``itemsize`` bytes an element: a dropout
    mask, the log-sum-exp of an attention row, the mean and deviation of a normalised row.
    ``home``: where an axis splits routed rows and what they go to, it lies where they come from.
    ``unless``: an implementation that makes do without it.
    """

    dims: tuple[str, ...]
    itemsize: int
    home: bool = False
    unless: str = ""


@dataclass(frozen=True, slots=True)
class Streamed(TupleRecord):
    """Bytes for each point of ``dims`` that the op reads and writes in its forward one after the
    other with its products, where no product hides them."""

    dims: tuple[str, ...]
    bytes_each: float


@dataclass(frozen=True, slots=True)
class Chunked(TupleRecord):
    """An op that runs in ``count`` chunks of a factor, one after the other: of as equal sizes as
    can be. ``products``: calls of products in each; ``most``: of the factor at once, whatever the
    count is, in what the op holds while it runs; 0: as many as a chunk has."""

    factor: str
    count: int
    products: int
    most: int = 0

    def at_once(self, extent: int) -> int:
        """Of the largest chunk."""
        each = -(-extent // self.count)
        return min(each, self.most) if self.most else each

    def sizes(self, extent: int) -> tuple[tuple[int, int], ...]:
        """(extent of a chunk, how many there are), of chunks that are not empty."""
        each, more = divmod(extent, self.count)
        pairs = ((each + 1, more), (each, self.count - more))
        return tuple((size, times) for size, times in pairs if size and times)


@dataclass(frozen=True, slots=True)
class Routed(TupleRecord):
    """Rows that go to indices of ``factor`` unevenly, those of the busiest over the mean: in the
    mean of steps, and in the worst one; see `autopar.nouns.imbalance`.

    of_ranks: the same of ranks that share the indices, where their rows are known: (ranks, in the
              mean, in the worst).
    """

    factor: str
    mean: float
    worst: float
    of_ranks: tuple[tuple[int, float, float], ...] = ()

    def busiest(self, indices: int, ranks: int, *, worst: bool) -> float:
        """Of so many ranks that share so many indices."""
        for known, mean, most in self.of_ranks:
            if known == ranks:
                return most if worst else mean
        return busiest_rank(self.worst if worst else self.mean, indices, ranks)
