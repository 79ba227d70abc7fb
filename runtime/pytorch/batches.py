"""From a global batch to the local microbatches of this rank."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from autopar.nouns.errors import UserError
from autopar.nouns.workload import Workload
from autopar.runtime.pytorch.counting import not_counted
from autopar.runtime.pytorch.parameters import as_computed
from autopar.runtime.pytorch.portions import CutBatch, check_numbers, moved, own_tokens
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.sequence_slices import in_slices
from autopar.runtime.shared.planned_batch import batch_of
from autopar.runtime.shared.settings import ProgramError, Settings

Batch = Mapping[str, Any]


def global_batch(workload: Workload, step: int) -> Batch:
    """The whole batch of a step. torch's random numbers depend on the step alone while it is made,
    so that every rank makes the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed + step)
        return cast(Batch, batch_of(workload, step))


def cut_batch(batch: Batch, ranks: Ranks, settings: Settings) -> Sequence[Mapping[str, Any]]:
    """This rank's microbatches, in order.

    Dim 0 of every tensor is cut into microbatches first, then over ``dp_replicate``, then over
    ``dp_shard``; dim 1 of sequences over ``cp``, or into slices. Floats are in
    the dtype of compute, as parameters are. Raises `ProgramError` where a dim does not divide. A
    batch that is cut already stays so.
    """
    if isinstance(batch, CutBatch):
        return list(batch.microbatches)
    micro, width = settings.microbatches, ranks.size(*ranks.sample_axes)
    place = ranks.index(*ranks.sample_axes)
    pieces: list[dict[str, Any]] = [{} for _ in range(micro)]
    for name, value in batch.items():
        check_numbers(name, value, settings)
        if not isinstance(value, torch.Tensor) or name in settings.whole_inputs:
            whole = as_computed(moved(value, ranks.device))
            for piece in pieces:
                piece[name] = whole
            continue
        if value.dim() == 0 or value.shape[0] % (micro * width):
            raise ProgramError(
                f"batch[{name!r}] has shape {list(value.shape)}; dim 0 must divide by "
                f"{micro} microbatches x {width} data ranks = {micro * width}: give a global batch "
                "of the size that was planned for, or plan for this one"
            )
        rows = value.shape[0] // (micro * width)
        for i, piece in enumerate(pieces):
            start = (i * width + place) * rows
            part = moved(value[start : start + rows], ranks.device)
            piece[name] = as_computed(own_tokens(name, part, ranks, settings))
    return in_slices(pieces, settings) if settings.seq_slices > 1 else pieces


class BatchesDiffer(UserError):
    """The ranks of one job were given different global batches."""


def check_batches(batch: Batch) -> None:
    """Raises `BatchesDiffer` on every rank unless all have the same global batch.

    A collective call that reads the whole batch, and names what differs; `compare_batches` tells
    only that something does.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = {name: _digest(value) for name, value in batch.items()}
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    for rank, other in enumerate(by_rank):
        names = [n for n in (*by_rank[0], *other) if by_rank[0].get(n) != other.get(n)]
        if names:
            raise BatchesDiffer(
                f"batch[{names[0]!r}] of rank {rank} is not that of rank 0: every rank passes the "
                "same global batch and computes on its own part; seed what is random in it by the "
                "number of the step"
            )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The digests of all ranks' batches on their way to every rank, while a step computes."""

    batch: Batch
    extremes: torch.Tensor
    work: Any

    def finish(self) -> bool:
        """Whether any rank was ``asked``. Raises `BatchesDiffer` on every rank unless all have the
        same batch."""
        self.work.wait()
        largest, least, asked = (int(n) for n in self.extremes)
        if largest != -least:
            check_batches(self.batch)
            raise BatchesDiffer(
                "the global batches of the ranks differ: every rank passes the same one, in the "
                "same order of names"
            )
        return bool(asked)


def check_alike(batch: Batch) -> None:
    """Raises `BatchesDiffer` on every rank unless all have the same global batch: see
    `compare_batches`, which does not wait."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        compare_batches(batch, elsewhere=True).finish()


def compare_batches(batch: Batch, elsewhere: bool = False, asked: bool = False) -> Comparison:
    """Starts to compare the global batches of all ranks, 24 bytes from each, see `Comparison`;
    ``asked`` is something that any rank lets all of them know.

    elsewhere: also entries that lie on an accelerator, whose reading waits for what it computes.
    """
    own = digest(batch, elsewhere)
    extremes = torch.tensor([own, -own, asked], dtype=torch.int64, device=meeting_place())
    with not_counted():
        work = dist.all_reduce(extremes, op=dist.ReduceOp.MAX, async_op=True)
    return Comparison(batch, extremes, work)


def digest(batch: Batch, elsewhere: bool) -> int:
    """CRC-32 of names and values; ``elsewhere``: also of what lies on an accelerator."""
    own = 0
    for name, value in batch.items():
        own = zlib.crc32(name.encode(), own)
        if not isinstance(value, torch.Tensor):
            own = zlib.crc32(repr(value).encode(), own)
        elif value.device.type == "cpu" or elsewhere:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            own = zlib.crc32(flat.numpy().data, own)
    return own


def meeting_place() -> torch.device:
    """Where a few bytes lie that all ranks exchange: on the CPU, if the backend can."""
    if "gloo" in str(dist.get_backend_config()) or dist.get_backend() == "fake":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    text = f"{value.dtype} {list(value.shape)} "
    return text + hashlib.sha256(flat.numpy().tobytes()).hexdigest()
