"""Every import of a private torch module, in one place: what a new torch may move stands here.

One import a line, with the reason. Tests import this module alone, so that a move names itself.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo  # fake tensors and optimizers import it at first use; here before ranks fork
import torch.distributed._functional_collectives  # registers the ops named at the end
from torch._dynamo import _trace_wrapped_higher_order_op as trace_wrapped
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,
)  # a tensor with a device and no memory
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # ops on fake tensors
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef  # memory that may go
from torch.nn.attention import flex_attention
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every op
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only as tree_map_only  # tensors in nested arguments

functional_collectives = torch.ops._c10d_functional  # collectives that compile, seen by modes
in_kernel_of = in_kernel_invocation_manager  # a mode's fake tensors are meta tensors inside
without_modes = _disable_current_modes  # real ops inside of a mode
resolve_group = _resolve_process_group  # a process group by its name
causal_check = (torch.nn.modules.transformer, "_detect_is_causal_mask")  # reads a mask's values
mapped_over_indices = (flex_attention, "_vmap_for_bhqkv")  # calls a function for every index
scalar_indexing = (trace_wrapped, "TransformGetItemToIndex")  # x[i] inside of such a function
exporting = _compiling_state_context  # the state that torch.export runs a model in
without_torch_function = torch._C.DisableTorchFunction  # no function mode sees what is inside


def fsdp_post_backward(root: FSDPModule) -> None:
    """What FSDP2 does when a backward has ended (reduce, reshard, wait), as its flags say now: a
    backward in two parts has no end that its hooks see."""
    root._get_fsdp_state()._root_post_backward_final_callback()


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


@contextmanager
def step_hooks_once(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hooks of the optimizer's step, and those of all optimizers, are called before and after what
    is inside, and not by the steps there. What a hook gives back is not looked at."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    before = [*_global_optimizer_pre_hooks.values(), *own[0].values()]
    after = [*own[1].values(), *_global_optimizer_post_hooks.values()]
    for hook in before:
        hook(optimizer, (), {})
    tables: list[dict[int, Any]] = [*own, _global_optimizer_pre_hooks]
    tables.append(_global_optimizer_post_hooks)
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)
    for hook in after:
        hook(optimizer, (), {})


def decompositions() -> Any:
    """PyTorch's own table of what its ops are made of, by op."""
    from torch._decomp import core_aten_decompositions

    return core_aten_decompositions()


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
