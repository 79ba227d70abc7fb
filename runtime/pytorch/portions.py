"""Batches of any size, cut into what each data rank computes on.

Shares of a loss add up, so ranks and microbatches may have unequal numbers of samples, each share
weighted as `runtime.shared.loss_share` says. Who has none computes on a sample of others, for
collectives want every rank, with a weight of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from autopar.nouns.axes import SEQUENCES
from autopar.nouns.batch import BatchEntry
from autopar.runtime.pytorch.parameters import as_computed
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.zigzag import own_zigzag
from autopar.runtime.shared.planned_batch import OtherBatch
from autopar.runtime.shared.settings import ProgramError, Settings
from autopar.torch_private.modes import FakeTensor

Shapes = Mapping[str, tuple[int, ...]]


class Microbatch(dict[str, Any]):
    """A microbatch whose share of the loss counts ``weight`` times; ``shapes``: what pipelines send
    of it by name, where those are not the planned ones; ``slice``: which one of its sequences."""

    def __init__(
        self,
        entries: Mapping[str, Any],
        weight: float,
        shapes: Shapes | None = None,
        slice: int = 0,
    ) -> None:
        super().__init__(entries)
        self.weight = weight
        self.shapes = shapes
        self.slice = slice


def weighted(share: torch.Tensor, microbatch: Mapping[str, Any]) -> torch.Tensor:
    """A share of the loss, as often as its microbatch counts."""
    weight = weight_of(microbatch)
    return share if weight == 1.0 else share * weight


def weight_of(microbatch: Mapping[str, Any]) -> float:
    return microbatch.weight if isinstance(microbatch, Microbatch) else 1.0


def shapes_of(microbatch: Mapping[str, Any]) -> Shapes | None:
    return microbatch.shapes if isinstance(microbatch, Microbatch) else None


class LocalBatch(dict[str, Any]):
    """What one data rank has of a global batch.

    rows:    its samples; where there are none, the tensors hold one of other ranks.
    samples: those of all data ranks; None where only that many is known.
    place:   which batch of a loader it is: epoch and number.
    source:  that loader.
    """

    def __init__(
        self,
        entries: Mapping[str, Any],
        rows: int,
        samples: int | None = None,
        place: tuple[int, int] = (0, 0),
        source: object = None,
    ) -> None:
        super().__init__(entries)
        self.rows = rows
        self.samples = samples
        self.place = place
        self.source = source


class CutBatch(dict[str, Any]):
    """A batch with the microbatches that this rank takes of it."""

    def __init__(self, entries: Mapping[str, Any], microbatches: Sequence[Microbatch]) -> None:
        super().__init__(entries)
        self.microbatches = list(microbatches)


def even_split(total: int, parts: int, part: int) -> range:
    """Places of ``part`` of ``total`` in a row; the first parts have one more."""
    base, more = divmod(total, parts)
    start = part * base + min(part, more)
    return range(start, start + base + (part < more))


def cut_names(planned: Iterable[BatchEntry]) -> list[str]:
    """Entries whose dim 0 counts samples."""
    return [e.name for e in planned if e.batch_dim is not None]


def rows_of(batch: Mapping[str, Any], planned: Iterable[BatchEntry]) -> int:
    """Samples of ``batch``. Raises `OtherBatch` unless its entries are those of ``planned``, but
    for the size of dim 0."""
    if isinstance(batch, LocalBatch):
        return batch.rows
    entries = tuple(planned)
    sizes = {name: batch[name].shape[0] for name in cut_names(entries) if _has_rows(batch, name)}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{name} {n}" for name, n in sizes.items())
        raise OtherBatch(f"the entries of the batch have different numbers of samples: {shown}")
    return next(iter(sizes.values()), 0)


def _has_rows(batch: Mapping[str, Any], name: str) -> bool:
    return isinstance(batch.get(name), torch.Tensor) and batch[name].dim() > 0


def check_entries(batch: Mapping[str, Any], planned: Iterable[BatchEntry]) -> None:
    """Raises `OtherBatch` for other names, dtypes, or shapes behind the dim that counts samples."""
    entries = tuple(planned)
    cut = set(cut_names(entries))
    wanted = {e.name: _shown(e.dtype, e.shape, e.name in cut) for e in entries}
    given = {name: f"a {type(value).__name__}" for name, value in batch.items()}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            given[name] = _shown(dtype, tuple(value.shape), name in cut)
    for name in (*wanted, *given):
        if given.get(name) != wanted.get(name):
            raise OtherBatch(
                f"batch[{name!r}] is {given.get(name, 'missing')}; where the plan was made it is "
                f"{wanted.get(name, 'missing')}: give such a batch, or plan again for this one"
            )


def _shown(dtype: str, shape: tuple[int, ...], cut: bool) -> str:
    """``int64 [samples, 16]``"""
    sizes = ["samples", *map(str, shape[1:])] if cut and shape else map(str, shape)
    return f"{dtype} [{', '.join(sizes)}]"


def portions(
    batch: Mapping[str, Any],
    mine: range,
    count: int,
    names: Iterable[str],
    weigh: Callable[[int], float],
    own: Callable[[str, Any], Any],
) -> CutBatch:
    """``count`` microbatches of the rows ``mine`` of ``batch``, as even as can be; ``weigh`` gives
    the weight of one by its number of samples, ``own`` what this rank has of an entry of it."""
    cut = set(names)
    made = []
    for i in range(count):
        part = even_split(len(mine), count, i)
        start = mine.start + part.start if part else 0
        rows = slice(start, start + max(len(part), 1))
        entries = {n: v[rows] if n in cut else v for n, v in batch.items()}
        computed = {name: as_computed(own(name, value)) for name, value in entries.items()}
        made.append(Microbatch(computed, weigh(len(part))))
    return CutBatch(batch, made)


def own_tokens(name: str, value: Any, ranks: Ranks, settings: Settings) -> Any:
    """Of an entry with sequences, dim 1, the piece of this rank along ``cp``; asked where the rank
    computes, since pieces of a host's memory cannot be copied without a wait. Raises `ProgramError`
    where it does not divide."""
    width = ranks.size(*SEQUENCES)
    if name not in settings.sequences or width == 1:
        return value
    pieces = 2 * width if settings.order == "zigzag" else width
    if value.shape[1] % pieces:
        raise ProgramError(
            f"batch[{name!r}] has shape {list(value.shape)}; dim 1 must divide into {pieces} pieces"
            f" for the {width} ranks of cp: give sequences of the length that was planned for, or "
            "plan for these"
        )
    place = ranks.index(*SEQUENCES)
    if settings.order == "zigzag":
        return own_zigzag(value, 1, place, width)
    length = value.shape[1] // width
    return value.narrow(1, place * length, length).contiguous()


def check_numbers(name: str, value: Any, settings: Settings) -> None:
    """Raises `OtherBatch` unless each sample has the numbers that the program was made for, where
    it was made for some."""
    wanted = settings.alike.get(name)
    if wanted is None or value.is_meta or isinstance(value, FakeTensor):  # which has no values
        return
    rows = value.reshape(-1, len(wanted))
    differing = rows.ne(torch.tensor(wanted, device=value.device)).any(1).nonzero()
    if len(differing):
        row = int(differing[0])
        raise OtherBatch(
            f"batch[{name!r}] has {rows[row].tolist()} at sample {row}, and the program is that of "
            f"batches whose every sample has {list(wanted)}, as where the plan was made: the "
            "forward makes sizes of these numbers. Give batches of one size (images that are "
            "resized or padded to it), or plan for each size"
        )


def moved(value: Any, device: torch.device) -> Any:
    """A tensor on ``device``; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.device != device:
        return value.to(device, non_blocking=True)
    return value
