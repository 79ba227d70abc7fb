"""Groups of processes, FSDP2, and devices that are not there."""

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

resolve_group = _resolve_process_group  # a process group by its name


_made: Counter[tuple[int, ...]] = Counter()


def group_of(ranks: Sequence[int], what: str) -> dist.ProcessGroup:
    """A process group of these ranks, all of which call, and nobody else; this one is of them.

    They meet under a name that follows from the ranks, ``what`` they do with it, and how many
    groups of theirs there have been. torch's own names count all groups that a process has made,
    so that ranks which made others in between (stages of a pipeline) would wait for ever.
    """
    here, whole = tuple(ranks), dist.group.WORLD
    assert whole is not None, "there are no processes to group"
    _made[here] += 1
    name = f"{what} of {','.join(map(str, here))}, {_made[here]}"
    plain, bound = c10d._process_group_name, whole.bound_device_id
    c10d._process_group_name = lambda ranks, use_hashed_name: c10d.GroupName(name)
    # Of a device that is bound NCCL splits the communicator of all, which all had to ask for.
    whole.bound_device_id = None
    try:
        group: dist.ProcessGroup = dist.new_group(
            [*here], use_local_synchronization=True, group_desc=what
        )
    finally:
        c10d._process_group_name, whole.bound_device_id = plain, bound
    return group


def fsdp_post_backward(root: FSDPModule) -> None:
    """What FSDP2 does when a backward has ended (reduce, reshard, wait), as its flags say now: a
    backward in two parts has no end that its hooks see."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def ddp_ignores(model: nn.Module, names: Sequence[str]) -> None:
    """DistributedDataParallel leaves these parameters of ``model`` as they are.

    It looks for the model's own, of no module inside, by a name with a dot in front when it gathers
    what to reduce, and without one elsewhere.
    """
    ignores = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignores(model, [*names, *(f".{name}" for name in names if "." not in name)])  # type: ignore[no-untyped-call]


def sharded_over(mesh: DeviceMesh) -> Any:
    """What FSDP2 is told of a parameter that it shards over another mesh than its unit: the last
    dim of ``mesh`` shards, one before it replicates."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    if mesh.ndim == 1:
        return ShardPlacementResult(None, FSDPMeshInfo(mesh, shard_mesh_dim=0))
    return ShardPlacementResult(None, HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0))


def fake_store() -> Any:
    """What a process group of the backend "fake" keeps its keys in: nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fake_work() -> Any:
    """The class of what a collective of the backend "fake" gives."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork


def python_device(name: str, module: Any, lost: Callable[[BaseException], None]) -> None:
    """Makes ``name`` a device whose module is ``module``, without a kernel; once a process.

    ``lost`` is told what a hook of autograd raises. Its error is pending while C++ unwinds, which
    asks for the device's type on the way; Python would refuse to answer with an error pending, and
    the process would end. So the error is taken there, and `backward` ends with a SystemError.
    """
    from torch.utils.backend_registration import (
        _DummyDeviceGuard,
        _setup_privateuseone_for_python_backend,
    )

    class Guard(_DummyDeviceGuard):
        def type_(self) -> Any:
            try:
                ctypes.pythonapi.Py_IsInitialized()  # any call raises what is pending
            except BaseException as error:
                lost(error)
            return super().type_()  # type: ignore[no-untyped-call]

    _setup_privateuseone_for_python_backend(name, module, device_guard=Guard())


def context_parallel(gathers: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """torch's own ring attention, forward and backward, by any kernel; balanced, in zigzag order.

    ``gathers``: keys and values come by one all-gather, which is its default; else around the ring.
    Sets this for all of the process.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as own

    method = own._RotateMethod.ALL_GATHER if gathers else own._RotateMethod.ALL_TO_ALL
    own._cp_options.enable_load_balance = True
    own._cp_options.rotate_method = method
    return own._templated_ring_attention, own._templated_ring_attention_backward


def fsdp_gathers_by(
    parameter: DTensor,
    before: Callable[..., tuple[tuple[Tensor, ...], Any]],
    after: Callable[..., tuple[Tensor, tuple[Tensor, ...]] | None],
) -> None:
    """What FSDP2 makes of this rank's piece of a parameter before it gathers it, and of what comes.

    ``before(mesh, size, stride, module, policy)`` gives what travels, padded as the piece is, and
    what ``after(gathered, given, dtype, out=None)`` is given beside it. ``after`` gives the whole
    parameter and what of its memory is not that of ``gathered``; with ``out`` it makes this, which
    it gave before, the whole again.
    """
    piece: Any = parameter._local_tensor
    piece.fsdp_pre_all_gather, piece.fsdp_post_all_gather = before, after


def fsdp_gathers_in_line(unit: FSDPModule) -> None:
    """Its all-gather begins when what was issued before it is done, and is waited for."""
    unit._set_unshard_async_op(True)
