"""Sending and receiving between the ranks of a pipeline, without waiting before it must be.

Ranks of equal place on all other axes are a pipeline of their own. gloo pairs messages by tag,
which is of the edge, the direction and the microbatch; NCCL by their order on each way
(`messages.Traffic`), and each direction has a communicator so that the two ways of a pair of ranks
do not wait for one another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.nouns.axes import PIPELINE
from autopar.runtime.pytorch.accelerators import is_accelerator
from autopar.runtime.pytorch.pipeline.messages import Message, Traffic
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.stage import Value
from autopar.torch_private.distributed import group_of


class Undelivered(Exception):
    """A message whose other end is gone or hangs."""

    def __init__(self, message: Message, cause: Exception) -> None:
        super().__init__(str(cause))
        self.message = message


@contextmanager
def _delivering(message: Message) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed raises nothing narrower with gloo
        raise Undelivered(message, error) from error


class Mail:
    """The messages of one rank, step after step. All methods may raise `Undelivered`."""

    def __init__(
        self,
        traffic: Traffic,
        ranks: Ranks,
        values: Mapping[str, Value],
        wire: Mapping[str, torch.dtype],
        like: Mail | None = None,
    ) -> None:
        """``like``: one over the same ranks, whose process groups this one shares."""
        self.ranks = ranks
        self.shapes: Sequence[Mapping[str, tuple[int, ...]] | None] = ()
        self.rank = ranks.index(PIPELINE)
        self._values, self._wire = values, wire
        self._edges = traffic.edges
        self._microbatches = 1 + max((m.microbatch for m in traffic.messages), default=0)
        self._posts = traffic.receives(self.rank)
        self._sends = traffic.sends(self.rank)
        self._received: dict[Message, tuple[Tensor, dist.Work | None]] = {}
        self._on_their_way: dict[int, list[tuple[Message, Tensor, dist.Work | None]]]
        self._on_their_way = defaultdict(list)
        self._used_of = {(m.edge, m.kind, m.microbatch): m for m in traffic.messages}
        group = ranks.group(PIPELINE) if like is None else None
        self._groups: dict[bool, dist.ProcessGroup | None] = {True: group, False: group}
        if like is not None:
            self._groups = like._groups
        elif is_accelerator(ranks.device) and group is not None:
            self._groups[False] = _twin(ranks)
            self._meet(traffic)

    @property
    def held(self) -> int:
        """Receives that are posted and not yet taken."""
        return len(self._received)

    def size_bytes(self, value: str) -> int:
        """Of one message with ``value`` or its gradient."""
        return math.prod(self._values[value].shape) * self._wire[value].itemsize

    def post(self, number: int) -> None:
        """The receives that stand before action ``number``."""
        for message in self._posts.get(number, ()):
            value = self._edges[message.edge].value
            shapes = self.shapes[message.microbatch] if self.shapes else None
            shape = self._values[value].shape if shapes is None else shapes[value]
            buffer = torch.empty(shape, dtype=self._wire[value], device=self.ranks.device)
            with _delivering(message):
                work = dist.irecv(
                    buffer,
                    group=self._group(message),
                    group_src=message.source,
                    tag=self._tag(message),
                )
            self._received[message] = (buffer, work)

    def take(self, edge: int, kind: str, microbatch: int) -> Tensor:
        """A message that was posted, waited for."""
        message = self._used_of[edge, kind, microbatch]  # type: ignore[index]
        buffer, work = self._received.pop(message)
        if work is not None:
            with _delivering(message):
                work.wait()
        self._forget(message)
        return buffer

    def send(self, number: int, tensors: Mapping[tuple[int, str], Tensor]) -> list[Message]:
        """What stands behind action ``number``, of what it made by edge and kind."""
        sent = self._sends.get(number, [])
        for message in sent:
            tensor = tensors[message.edge, message.kind]
            with _delivering(message):
                work = dist.isend(
                    tensor,
                    group=self._group(message),
                    group_dst=message.target,
                    tag=self._tag(message),
                )
            self._on_their_way[message.target].append((message, tensor, work))
        return list(sent)

    def finish(self) -> None:
        """Waits until everything has been received."""
        for waiting in self._on_their_way.values():
            for message, _, work in waiting:
                if work is not None:
                    with _delivering(message):
                        work.wait()
        self._on_their_way.clear()

    def _forget(self, message: Message) -> None:
        """Frees what has arrived: what ``message``'s sender needed for actions up to the one that
        made it. gloo cannot be asked, and to wait for the rest could block."""
        waiting = self._on_their_way.get(message.source)
        if not waiting:
            return
        left = []
        for entry in waiting:
            sent, _, work = entry
            arrived = sent.used <= message.made
            if not arrived and work is not None and is_accelerator(self.ranks.device):
                arrived = work.is_completed()
            if not arrived:
                left.append(entry)
            elif work is not None:
                with _delivering(sent):
                    work.wait()
        self._on_their_way[message.source] = left

    def _group(self, message: Message) -> dist.ProcessGroup | None:
        return self._groups[message.source < message.target]

    def _tag(self, message: Message) -> int:
        way = message.edge * 2 + (message.kind == "gradient")
        return way * self._microbatches + message.microbatch

    def _meet(self, traffic: Traffic) -> None:
        """One message on each way, in one order: the first makes a communicator, which waits for
        the other end and could wait in a circle."""
        for source, target in traffic.pairs():
            if self.rank in (source, target):
                group = self._groups[source < target]
                token = torch.zeros(1, device=self.ranks.device)
                if self.rank == source:
                    dist.send(token, group=group, group_dst=target)
                else:
                    dist.recv(token, group=group, group_src=source)


def _twin(ranks: Ranks) -> dist.ProcessGroup:
    """A second group of the ranks along ``pp``; each of them calls."""
    own = next(line for line in ranks.members(PIPELINE) if ranks.rank in line)
    return group_of(own, f"{PIPELINE} back")
