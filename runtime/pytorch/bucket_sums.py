"""DDP's buckets of gradients summed by an all-reduce of ours, while backward goes on.

DDP calls a hook with each bucket from autograd's thread, which must not wait there, and takes what
its future holds. Buckets are summed one after the other on one thread, so all ranks issue the same
collectives in the same order, whichever is done first. On GPUs, where a call returns before it has
run, that is a stream in place of the thread. A dispatch mode sees no other thread: under one,
buckets are summed at once.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from autopar.torch_private.modes import dispatch_modes

AllReduce = Callable[[Tensor], None]
"""Sums a tensor over the ranks, in place."""


class BucketSums:
    """Sums, where DDP by itself gives means: no factor of the number of ranks is wanted."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce
        self._thread = ThreadPoolExecutor(1, "bucket sums")
        self._stream: torch.cuda.Stream | None = None

    def register(self, model: DistributedDataParallel) -> None:
        """Before the first backward; once for a model."""
        model.register_comm_hook(self, _hook)

    def start(self, gradients: Tensor) -> Future[Tensor]:
        """``gradients`` when they are summed; what the all-reduce raises, whoever waits gets."""
        if gradients.is_cuda and not dispatch_modes():
            return self._on_stream(gradients)
        future: Future[Tensor] = Future()
        if dispatch_modes():
            self._run(gradients, future)
        else:
            self._thread.submit(self._run, gradients, future)
        return future

    def _on_stream(self, gradients: Tensor) -> Future[Tensor]:
        """The future holds what its stream has issued: who waits for it lets a stream wait."""
        here = gradients.device
        future: Future[Tensor] = Future(devices=[here])
        if self._stream is None:
            self._stream = torch.cuda.Stream(here)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(here))
        with torch.cuda.stream(self._stream):
            self._run(gradients, future)
        return future

    def _run(self, gradients: Tensor, future: Future[Tensor]) -> None:
        try:
            self._all_reduce(gradients)
        except Exception as error:  # of a thread, so it would be lost
            future.set_exception(error)  # type: ignore[arg-type]  # torch's own says so
        else:
            future.set_result(gradients)


# DDP reads these annotations as they are, not as texts.
def _hook(sums: BucketSums, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    return sums.start(bucket.buffer())
