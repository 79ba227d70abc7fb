"""How calls are timed: on every rank at once, and each figure is one JSON line of rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.profile.figures import ENOUGH_S, FEWEST, MOST, Known, write
from autopar.runtime.pytorch.training.load import start

SETTLED_S, SETTLED = 2.0, 8
"""The same where memory is taken and given back: a heap needs some steps to reach its size."""
WAITS = 5
"""Figures of `Bench.waited`, each the mean of many calls: delays are rare and long."""


class Bench:
    """Times calls on every rank at once; rank 0 prints the result."""

    def __init__(
        self,
        known: Known,
        enough_s: float = ENOUGH_S,
        fewest: int = FEWEST,
    ) -> None:
        """``known`` is not measured again; repeats take ``enough_s`` where they are short, and are
        more than ``fewest``."""
        self.enough_s, self.fewest = enough_s, fewest
        self.device = start("auto")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.known = known

    def wants(self, subject: str, key: str, size_bytes: float, flops: float) -> bool:
        return (subject, key, float(size_bytes), float(flops)) not in self.known

    def slowest(self, *calls: Callable[[], Any], settles: bool = False) -> list[list[float]]:
        """Seconds of the slowest rank for each of ``calls``: one figure a repeat.

        ``settles``: the calls get faster for a while, so their first half is left out.
        """
        return self._times(calls, settles).amax(0).T.tolist()

    def mean(self, *calls: Callable[[], Any]) -> list[list[float]]:
        """Seconds of the mean over ranks for each of ``calls``: one figure a repeat."""
        return self._times(calls).mean(0).T.tolist()

    def waited(self, call: Callable[[], Any]) -> list[float]:
        """Seconds by which the slowest rank falls behind the mean, each the mean of some calls."""
        taken = torch.cat([self._times([call]) for _ in range(WAITS)], dim=1)[..., 0]
        return [float(part.mean()) for part in (taken.amax(0) - taken.mean(0)).chunk(WAITS)]

    def _times(self, calls: Sequence[Callable[[], Any]], settles: bool = False) -> torch.Tensor:
        """[ranks, repeats, calls]; the calls are run in turns."""
        least_s, fewest = (SETTLED_S, SETTLED) if settles else (self.enough_s, self.fewest)
        rows: list[list[float]] = []
        enough = torch.zeros((), device=self.device)
        began = time.perf_counter()
        while not enough.item():
            row = []
            for call in calls:
                dist.barrier()
                before = time.perf_counter()
                call()
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                row.append(time.perf_counter() - before)
            rows.append(row)
            late = time.perf_counter() - began > least_s
            enough.fill_(float(len(rows) >= MOST or (late and len(rows) > fewest)))
            dist.broadcast(enough, 0)
        own = torch.tensor(
            rows[len(rows) // 2 if settles else 1 :], dtype=torch.float64, device=self.device
        )
        every = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(every, own)
        return torch.stack(every)

    def write(
        self, subject: str, key: str, size_bytes: float, flops: float, times: list[float]
    ) -> None:
        """`figures.write`, by rank 0."""
        if not self.rank:
            write(subject, key, size_bytes, flops, times)
