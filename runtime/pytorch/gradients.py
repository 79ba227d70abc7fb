"""After backward: the sums that are still missing, the norm, and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.runtime.pytorch.held import Held
from autopar.runtime.pytorch.ranks import Ranks
from autopar.torch_private.ops import norms_of_all, scale_all

BUCKET_BYTES = 25 * 2**20


def reduce_late(held: Iterable[Held], ranks: Ranks) -> None:
    """Sums the gradients that are partial (``tp:D``) over their axes, once a step, in buckets.

    A missing gradient counts as zero, since a rank whose share never reached the parameter must
    still take part. Afterwards ``leaf.grad`` is a view of a bucket.
    """
    for pending in [
        start_sum(members, ranks.group(*axes)) for axes, members in _by_axes(held).items()
    ]:
        pending.finish()


@dataclass(frozen=True, slots=True)
class Summing:
    """Gradients on their way through all-reduces, a bucket each."""

    buckets: list[tuple[dist.Work | None, torch.Tensor, list[Held]]]

    def finish(self) -> None:
        for work, flat, bucket in self.buckets:
            if work is not None:
                work.wait()
            pieces = torch.split(flat, [h.leaf.numel() for h in bucket])
            for member, piece in zip(bucket, pieces, strict=True):
                member.leaf.grad = piece.view_as(member.leaf)


def start_sum(held: list[Held], group: dist.ProcessGroup | None) -> Summing:
    """Starts to sum the gradients of ``held`` over ``group``; all of its ranks call it."""
    pending: list[tuple[dist.Work | None, torch.Tensor, list[Held]]] = []
    for bucket in _buckets(held):
        parts = [
            h.leaf.grad if h.leaf.grad is not None else torch.zeros_like(h.leaf) for h in bucket
        ]
        flat = torch.cat([p.reshape(-1) for p in parts])
        pending.append((dist.all_reduce(flat, group=group, async_op=True), flat, bucket))
    return Summing(pending)


def _by_axes(held: Iterable[Held]) -> dict[tuple[str, ...], list[Held]]:
    by_axes: dict[tuple[str, ...], list[Held]] = {}
    for member in held:
        if member.reduce and member.leaf.requires_grad and member.leaf.numel():
            by_axes.setdefault(member.reduce, []).append(member)
    return by_axes


def _buckets(members: list[Held]) -> Iterable[list[Held]]:
    """Runs of one dtype, each of `BUCKET_BYTES` or one tensor."""
    by_dtype: dict[torch.dtype, list[Held]] = {}
    for member in members:
        by_dtype.setdefault(member.leaf.dtype, []).append(member)
    for same in by_dtype.values():
        bucket: list[Held] = []
        size = 0
        for member in same:
            own = member.leaf.numel() * member.leaf.element_size()
            if bucket and size + own > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(member)
            size += own
        yield bucket


@dataclass(frozen=True, slots=True)
class NormOver:
    """The axes over which the squares of a norm are summed, and in which dtype."""

    axes: tuple[str, ...]
    dtype: torch.dtype

    @staticmethod
    def of(held: Iterable[Held], ranks: Ranks) -> NormOver:
        trained = [h for h in held if h.leaf.requires_grad]
        wide = any(h.leaf.dtype is torch.float64 for h in trained)
        axes = tuple(a for a in ranks.mesh.axes if any(a in h.split for h in trained))
        return NormOver(axes, torch.float64 if wide else torch.float32)

    @staticmethod
    def agreed(held: Iterable[Held], ranks: Ranks) -> NormOver:
        """Where the ranks hold different parameters: what all of them need. A collective call."""
        own = NormOver.of(held, ranks)
        if ranks.world == 1:
            return own
        every = [own] * ranks.world
        dist.all_gather_object(every, own)
        axes = tuple(a for a in ranks.mesh.axes if any(a in o.axes for o in every))
        wide = any(o.dtype is torch.float64 for o in every)
        return NormOver(axes, torch.float64 if wide else torch.float32)


def gradients_of(held: Iterable[Held]) -> dict[int, torch.Tensor]:
    """Copies of what there is, by the id of its holder."""
    return {id(h): h.leaf.grad.clone() for h in held if h.leaf.grad is not None}


@torch.no_grad()
def add_gradients(
    held: Iterable[Held], before: Mapping[int, torch.Tensor], weight: float = 1.0
) -> None:
    """Gradients become ``weight`` times as large, and those of ``before`` are added."""
    for h in held:
        if h.leaf.grad is not None and weight != 1.0:
            h.leaf.grad.mul_(weight)
        if id(h) in before:
            h.leaf.grad = before[id(h)] if h.leaf.grad is None else h.leaf.grad.add_(before[id(h)])


def total_norm(held: Iterable[Held], ranks: Ranks, over: NormOver | None = None) -> torch.Tensor:
    """The 2-norm of the whole gradient, the same on every rank: one all-reduce of a scalar.

    A piece that several ranks hold counts once: its square is divided by the number of its copies
    within the ranks that are summed over. ``over``: those of all ranks, where they differ.
    """
    with_grad = [h for h in held if h.leaf.requires_grad and h.leaf.grad is not None]
    over = over or NormOver.of(with_grad, ranks)
    axes = over.axes
    by_copies: dict[int, list[torch.Tensor]] = {}
    for member in with_grad:
        if not member.counted:
            continue
        copies = math.prod(ranks.size(a) for a in axes if a not in member.split)
        assert member.leaf.grad is not None
        by_copies.setdefault(copies, []).append(member.leaf.grad)
    total = torch.zeros((), dtype=over.dtype, device=ranks.device)
    for copies, grads in by_copies.items():
        norms = torch.stack([n.to(total.dtype) for n in norms_of_all(grads)])
        total += norms.square().sum() / copies
    group = ranks.group(*axes)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def clip(
    held: Iterable[Held], ranks: Ranks, max_norm: float, over: NormOver | None = None
) -> torch.Tensor:
    """Scales all gradients so that their norm is at most ``max_norm``; returns the norm before.

    The factor is that of `torch.nn.utils.clip_grad_norm_`: ``min(1, max_norm / (norm + 1e-6))``.
    """
    members = list(held)
    norm = total_norm(members, ranks, over)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    grads = [h.leaf.grad for h in members if h.leaf.grad is not None]
    if grads:
        scale_all(grads, factor)
    return norm
