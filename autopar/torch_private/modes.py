"""States that torch's functions run in: fake tensors, dispatch modes, autocast, gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
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
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every op
from torch.utils._python_dispatch import _disable_current_modes

in_kernel_of = in_kernel_invocation_manager  # a mode's fake tensors are meta tensors inside
without_modes = _disable_current_modes  # real ops inside of a mode
without_torch_function = torch._C.DisableTorchFunction  # no function mode sees what is inside
dispatch_modes = torch._C._len_torch_dispatch_stack  # how many modes see every op now
any_autocast = torch._C._is_any_autocast_enabled  # whether a device casts by itself now
set_grad = torch._C._set_grad_enabled  # what traces note where no_grad begins and ends
exporting = _compiling_state_context  # the state that torch.export runs a model in
causal_check = (torch.nn.modules.transformer, "_detect_is_causal_mask")  # reads a mask's values
size_check: Callable[[Any], None] = (
    torch._check
)  # of sizes that only the batch knows: what is given holds of them
value_check = (torch, "_check_tensor_all_with")  # raises unless all of a tensor is true
mapped_over_indices = (flex_attention, "_vmap_for_bhqkv")  # calls a function for every index
scalar_indexing = (trace_wrapped, "TransformGetItemToIndex")  # x[i] inside of such a function


@contextmanager
def uncounted(mode: Any) -> Iterator[None]:
    """Inside, ops do not count for a mode of selective checkpointing: it knows a result that it
    keeps by how many calls of the same op came before. None: there is no such mode."""
    if mode is None:
        yield
        return
    before = dict(mode.func_counter)
    try:
        yield
    finally:
        mode.func_counter.clear()
        mode.func_counter.update(before)


@contextmanager
def fakes_copied_by(copy: Callable[[FakeTensor, dict[int, Any]], torch.Tensor]) -> Iterator[None]:
    """Inside, ``copy.deepcopy`` of a fake tensor is ``copy`` of it and the memo.

    Torch's own copies the attributes of the tensor, and so its mode with all that this knows: weak
    references to storages among them, whose memory is freed twice then (torch 2.13), and constants,
    which a copy under the mode refuses.
    """

    def copied(self: FakeTensor, memo: dict[int, Any]) -> torch.Tensor:
        return copy(self, memo)

    FakeTensor.__deepcopy__ = copied  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del FakeTensor.__deepcopy__
