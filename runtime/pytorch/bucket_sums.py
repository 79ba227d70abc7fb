"""DDP's buckets of gradients summed by an all-reduce of ours, while backward goes on.

DDP calls a hook with each bucket from autograd's thread, which must not wait there, and takes what
its future holds. Buckets are summed one after the other on one thread, so all ranks issue the same
collectives in the same order, whichever is done first. For processes on CPUs: on GPUs the calls
would belong on a stream of their own.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

AllReduce = Callable[[Tensor], None]
"""Sums a tensor over the ranks, in place."""


class BucketSums:
    """Sums, where DDP by itself gives means: no factor of the number of ranks is wanted."""

    def __init__(self, all_reduce: AllReduce) -> None:
        self._all_reduce = all_reduce
        self._thread = ThreadPoolExecutor(1, "bucket sums")

    def register(self, model: DistributedDataParallel) -> None:
        """Before the first backward; once for a model."""
        model.register_comm_hook(self, _hook)

    def start(self, gradients: Tensor) -> Future[Tensor]:
        """``gradients`` when they are summed; what the all-reduce raises, whoever waits gets."""
        future: Future[Tensor] = Future()
        self._thread.submit(self._run, gradients, future)
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
