"""Plays an algorithm's sends on a process group, step by step.

Each step's messages are issued together (`torch.distributed.batch_isend_irecv`) and waited for
before the next. Of one step, messages between two ranks keep the order of the algorithm's text,
which is how they are told apart; sums are made in that order too, so results are the same in every
run, bit for bit. The algorithm is proven before it is played first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.collectives.algorithm import Algorithm, AlgorithmError, Kind, Send, Step
from autopar.collectives.check import check

Group = dist.ProcessGroup


def all_reduce(x: Tensor, algorithm: Algorithm, group: Group) -> None:
    """``x`` [...] becomes the sum over the group, in place; any size does.

    Raises `AlgorithmError` for another collective or group, or an ``x`` that is not contiguous.
    """
    _whole(x, algorithm, "all_reduce", group)


def broadcast(x: Tensor, algorithm: Algorithm, group: Group) -> None:
    """``x`` [...] becomes that of the group's first rank, in place. Raises as `all_reduce`."""
    _whole(x, algorithm, "broadcast", group)


def all_gather(x: Tensor, algorithm: Algorithm, group: Group) -> Tensor:
    """[n, ...] on each of w ranks -> [w * n, ...]. Raises as `all_reduce`."""
    own = _proven(x, algorithm, "all_gather", group)
    whole = x.new_empty((algorithm.ranks * x.shape[0], *x.shape[1:]))
    pieces = whole.view(-1).tensor_split(algorithm.ranks)
    pieces[own].copy_(x.view(-1))
    _play([c for piece in pieces for c in piece.tensor_split(algorithm.per_rank)], algorithm, group)
    return whole


def reduce_scatter(x: Tensor, algorithm: Algorithm, group: Group) -> Tensor:
    """[w * n, ...] on each of w ranks -> [n, ...]; ``x`` stays. Raises as `all_reduce`, and where
    the ranks do not divide the first dim."""
    own = _proven(x, algorithm, "reduce_scatter", group)
    if x.shape[0] % algorithm.ranks:
        raise AlgorithmError(
            f"a reduce_scatter of {list(x.shape)} over {algorithm.ranks} ranks: they do not divide "
            f"{x.shape[0]}"
        )
    sums = x.clone()
    pieces = sums.view(-1).tensor_split(algorithm.ranks)
    _play([c for piece in pieces for c in piece.tensor_split(algorithm.per_rank)], algorithm, group)
    return sums.chunk(algorithm.ranks)[own].clone()


def _whole(x: Tensor, algorithm: Algorithm, kind: Kind, group: Group) -> None:
    _proven(x, algorithm, kind, group)
    _play(x.view(-1).tensor_split(algorithm.chunks), algorithm, group)


def _proven(x: Tensor, algorithm: Algorithm, kind: Kind, group: Group) -> int:
    """This rank's place in the group. Raises `AlgorithmError`."""
    if (algorithm.kind, algorithm.ranks) != (kind, dist.get_world_size(group)):
        raise AlgorithmError(
            f"{algorithm.name} does {algorithm.kind} of {algorithm.ranks} ranks; asked for was "
            f"{kind} of {dist.get_world_size(group)}"
        )
    if not x.is_contiguous() or (kind in ("all_gather", "reduce_scatter") and not x.dim()):
        raise AlgorithmError(
            f"{kind} of a tensor of shape {list(x.shape)} and strides {list(x.stride())}: give "
            "one that is contiguous" + ("" if x.dim() else ", with a dim to put pieces along")
        )
    _check(algorithm)
    return dist.get_rank(group)


_check = lru_cache(maxsize=64)(check)


def _play(chunks: Sequence[Tensor], algorithm: Algorithm, group: Group) -> None:
    """chunks: views of the buffer, some of which may be empty; those are not sent."""
    here = dist.get_rank(group)
    for step in algorithm.steps:
        _step(chunks, step, here, group)


def _step(chunks: Sequence[Tensor], step: Step, here: int, group: Group) -> None:
    sends = [s for s in step.sends if here in (s.source, s.destination) and chunks[s.chunk].numel()]
    busy = {send.chunk for send in sends if send.source == here}
    messages: list[dist.P2POp] = []
    beside: list[tuple[Send, Tensor]] = []
    for send in sends:
        chunk = chunks[send.chunk]
        if send.source == here:
            messages.append(dist.P2POp(dist.isend, chunk, group=group, group_peer=send.destination))
            continue
        if send.reduces or send.chunk in busy:  # what is being sent must stay until it is gone
            chunk = torch.empty_like(chunk)
            beside.append((send, chunk))
        messages.append(dist.P2POp(dist.irecv, chunk, group=group, group_peer=send.source))
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    for send, arrived in beside:
        if send.reduces:
            chunks[send.chunk].add_(arrived)
        else:
            chunks[send.chunk].copy_(arrived)
