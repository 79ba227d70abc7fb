"""The steps of a program that are compared with one device's, and what ranks tell one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.runtime.pytorch.parameters import Region, region_shape
from autopar.runtime.pytorch.training.trainer import Trainer
from autopar.runtime.verify.pytorch.comparison import Comparison, Piece
from autopar.runtime.verify.pytorch.reference import STEPS, Reference, is_compared


def compared_steps(
    trainer: Trainer,
    batch: Mapping[str, Any],
    wanted: Reference | None,
    comparison: Comparison,
    quiet: Callable[[], AbstractContextManager[Any]],
) -> list[torch.Tensor | None]:
    """`STEPS` steps, each on the reference's gradients once the program's own are compared; the
    norms that `Trainer.update` gives. All ranks call it, ``wanted`` is None on all but rank 0."""
    norms = []
    for step in range(STEPS):
        with quiet():
            loss = trainer.backward(batch)
        comparison.loss(step, float(loss))
        gather(gradient_pieces(trainer), partial(comparison.gradients, step))
        _give(trainer, wanted, step)
        norms.append(trainer.update())
    held: list[Piece] = [
        (h.name, region, own) for h in trainer.held for region, own in h.parts(h.leaf.detach())
    ]
    held += [(n, r, t) for n, t, r in trainer.storage.buffers() if is_compared(t)]
    gather(held, comparison.weights)
    return norms


def gradient_pieces(trainer: Trainer) -> list[Piece]:
    """What this rank has of gradients, by regions of the model's."""
    graded = ((h, h.leaf.grad) for h in trainer.held)
    return [
        (h.name, region, own)
        for h, grad in graded
        if grad is not None
        for region, own in h.parts(grad)
    ]


def compared_evaluation(
    trainer: Trainer,
    batch: Mapping[str, Any],
    comparison: Comparison,
    quiet: Callable[[], AbstractContextManager[Any]],
) -> None:
    """The loss that the program evaluates to, which is to change no buffer. All ranks call it."""
    before = {name: t.clone() for name, t, _ in trainer.storage.buffers()}
    with quiet():
        loss = trainer.evaluate(batch)
    own = [n for n, t, _ in trainer.storage.buffers() if not torch.equal(t, before[n])]
    every: list[list[str]] = [own]
    if dist.is_initialized():
        every = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, own)
    comparison.evaluation(float(loss), sorted({name for names in every for name in names}))


def _give(trainer: Trainer, wanted: Reference | None, step: int) -> None:
    """Overwrites the program's gradients with the reference's. Where the program has none, it
    stays without: then it has been told, or the weights will tell."""
    named = wanted.gradients[step] if wanted is not None else {}
    known = {name: tuple(g.shape) for name, g in named.items()}
    known, alias = broadcast((known, wanted.alias if wanted is not None else {}))
    sizes = {name: math.prod(shape) for name, shape in known.items()}
    flat = torch.empty(sum(sizes.values()), dtype=torch.float64)
    if named:
        torch.cat([g.detach().reshape(-1).cpu() for g in named.values()], out=flat)
    if dist.is_initialized():
        dist.broadcast(flat, src=0)
    parts = dict(zip(known, torch.split(flat, list(sizes.values())), strict=True))
    for held in trainer.held:
        name, grad = alias.get(held.name, held.name), held.leaf.grad
        if grad is not None and name in parts:
            whole = parts[name].view(known[name])
            for region, own in held.parts(grad):
                if whole[region].shape == own.shape:
                    own.copy_(whole[region])


def broadcast(value: Any) -> Any:
    """``value`` of rank 0, on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(pieces: list[Piece], compare: Callable[[list[Piece]], None]) -> None:
    """Hands the pieces of all ranks, in float64 on the CPU, to ``compare`` on rank 0."""
    flats = [t.detach().reshape(-1).to("cpu", torch.float64) for _, _, t in pieces]
    flat = torch.cat([*flats, torch.empty(0, dtype=torch.float64)])
    if not dist.is_initialized():
        compare(_pieces([(name, region) for name, region, _ in pieces], flat))
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    index: list[Any] | None = [None] * world if rank == 0 else None
    own = [(name, [(s.start, s.stop) for s in region]) for name, region, _ in pieces]
    dist.gather_object(own, index, dst=0)
    longest = torch.tensor(flat.numel())
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = nn.functional.pad(flat, (0, int(longest) - flat.numel()))
    into = [torch.empty_like(padded) for _ in range(world)] if rank == 0 else None
    dist.gather(padded, into, dst=0)
    if index is not None and into is not None:
        every: list[Piece] = []
        for named, values in zip(index, into, strict=True):
            regions = [(name, tuple(slice(*ends) for ends in region)) for name, region in named]
            every += _pieces(regions, values)
        compare(every)


def _pieces(named: list[tuple[str, Region]], flat: torch.Tensor) -> list[Piece]:
    pieces: list[Piece] = []
    start = 0
    for name, region in named:
        shape = region_shape(region)
        count = math.prod(shape)
        pieces.append((name, region, flat[start : start + count].view(shape)))
        start += count
    return pieces
