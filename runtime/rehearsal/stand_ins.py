"""What a rehearsal has in the place of other processes: groups that move nothing, and objects that
all ranks have alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.pytorch import batches, dispatch, experts, local_batches, replicated
from autopar.runtime.pytorch.pipeline import stages, ties
from autopar.runtime.pytorch.ranks import Ranks
from autopar.runtime.pytorch.training import load
from autopar.runtime.rehearsal import kernels
from autopar.runtime.rehearsal.second_device import Device
from autopar.torch_private.distributed import fake_store
from autopar.torch_private.modes import without_modes
from autopar.torch_private.modules import after_backward


def join(rank: int, world: int, device: Device, find: Callable[[str, str], None]) -> None:
    """Joins a job as `load.start` does on a GPU, with ``device`` in the place of CUDA.

    ``find`` is told of a process group that is made before the device is set: NCCL's would then
    all be on the first GPU of the machine.
    """

    def init(*given: Any, **more: Any) -> None:
        if not device.chosen:
            find("refused", "a process group is made before the device is set")
        plain("fake", rank=rank, world_size=world, store=fake_store())

    plain = dist.init_process_group
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    with (
        patch.dict(os.environ, {name: str(number) for name, number in numbers.items()}),
        patch.object(torch.cuda, "device_count", device.device_count),
        patch.object(torch.cuda, "set_device", device.set_device),
        patch.object(dist, "init_process_group", init),
    ):
        load.start("cuda")


def _gathered(made: list[Any], own: Any, group: Any = None) -> None:
    """All ranks have what this one has."""
    made[:] = [own] * len(made)


def _collected(own: Any, made: list[Any] | None = None, *given: Any, **more: Any) -> None:
    if made is not None:
        made[:] = [own] * len(made)


@contextmanager
def alone(rank: int, world: int, groups: list[list[int]]) -> Iterator[None]:
    """Inside, this process is ``rank`` of ``world`` that there are not, behind `join`; ``groups``
    collects who has to make each group, in the order in which this rank does."""
    plain, meshes = dist.new_group, Ranks.device_mesh

    def new_group(ranks: Any = None, *given: Any, **more: Any) -> Any:
        alone = ranks is not None and more.get("use_local_synchronization")
        groups.append(list(ranks) if alone else list(range(world)))
        return plain(ranks, *given, **{**more, "backend": "fake"})

    def device_mesh(ranks: Ranks, dims: Sequence[tuple[str, ...]], of: str = "") -> DeviceMesh:
        with without_modes():  # it reads its ranks
            return meshes(ranks, dims, of)

    all_holders = ties.holders

    def holders(own: Any, ranks: Ranks) -> dict[str, list[Any]]:
        # Every rank answers as this one does, and a stage holds what it holds once.
        made = all_holders(own, ranks)
        return {name: list({h.stage: h for h in held}.values()) for name, held in made.items()}

    one_by_one = experts.one_by_one

    def of_the_first(x: torch.Tensor, numbers: Sequence[int], *more: Any) -> torch.Tensor:
        # Routes have no values here: as if all named the first expert.
        return one_by_one(x, [len(x), *[0] * (len(numbers) - 1)], *more)

    on_host = dispatch.on_host

    def spread(sizes: Sequence[tuple[torch.Tensor, int]]) -> list[list[int]]:
        on_host(sizes)  # the host waits, whatever it reads
        return [dispatch.evenly(rows, len(size)) for size, rows in sizes]

    check = load.check_model_of

    def check_model(*given: Any, **more: Any) -> None:
        if rank == 0:  # which tells the others
            with without_modes(), as_captured():  # on the host, before there is a step
                check(*given, **more)

    with ExitStack() as stack:
        as_captured = stack.enter_context(kernels.in_place())
        for where, name, instead in (
            (dist, "new_group", new_group),
            (dist.distributed_c10d, "new_group", new_group),
            (dist, "all_gather_object", _gathered),
            (dist, "gather_object", _collected),
            (dist, "broadcast_object_list", lambda *given, **more: None),
            (Ranks, "device_mesh", device_mesh),
            (stages, "holders", holders),
            (experts, "one_by_one", of_the_first),
            (dispatch, "on_host", spread),
            (load, "check_model_of", check_model),
            (replicated, "DistributedDataParallel", Replicas),
            (batches.Comparison, "finish", lambda comparison: False),
            (batches, "digest", lambda batch, elsewhere: 0),
            (local_batches, "digest", lambda batch, elsewhere: 0),
        ):
            stack.enter_context(patch.object(where, name, instead))
        yield


class _Bucket:
    """Of one gradient, as a hook of DistributedDataParallel is given it."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient

    def buffer(self) -> torch.Tensor:
        return self._gradient.view(-1)


class Replicas(nn.Module):
    """What `DistributedDataParallel` does with gradients, one all-reduce each, in memory that it
    holds from the start: its own reducer stands in C++, and reads what fake tensors do not have."""

    def __init__(self, module: nn.Module, process_group: Any = None, **settings: Any) -> None:
        del settings
        super().__init__()
        self.module, self._group, self._sums = module, process_group, True
        self._works: list[tuple[Any, torch.Tensor]] = []
        self._hook: Callable[[_Bucket], Any] | None = None
        self._buckets: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in module.parameters():
            if parameter.requires_grad:
                self._buckets[parameter] = torch.empty_like(parameter)
                hooked: Any = parameter
                hooked.register_post_accumulate_grad_hook(self._made)

    def forward(self, *given: Any, **more: Any) -> Any:
        return self.module(*given, **more)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        self._hook = partial(hook, state)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._sums = False
        try:
            yield
        finally:
            self._sums = True

    def _made(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        bucket = self._buckets.get(parameter, parameter.grad)
        if bucket is not parameter.grad:
            parameter.grad = bucket.copy_(parameter.grad)
        if not self._sums:
            return
        if not self._works:
            after_backward(self._finish)
        if self._hook is not None:
            work = self._hook(_Bucket(parameter.grad))
        else:
            work = dist.all_reduce(parameter.grad, group=self._group, async_op=True)
        self._works.append((work, parameter.grad))

    def _finish(self) -> None:
        for work, gradient in self._works:
            work.wait()
            if self._hook is None:
                gradient.div_(dist.get_world_size(self._group))
        self._works.clear()
