"""What torch knows of a tensor and does not tell."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef  # memory that may go
from torch.utils._pytree import tree_map_only as tree_map_only  # tensors in nested arguments

new_subclass = torch.Tensor._make_subclass  # a tensor of a class from another's shape, at once
without_memory = torch.Tensor._make_wrapper_subclass  # of a class, a shape and a dtype
PARAMETER_MARK = "_is_param"  # among what a fake tensor has of its own


def memory_of(tensor: torch.Tensor) -> int:
    """A number for its memory, whether that is there or fake: equal for views of one."""
    at: int = tensor.untyped_storage()._cdata
    return at


def version_of(tensor: torch.Tensor) -> int:
    """How often its memory was written."""
    return tensor._version


def mark_parameter(tensor: torch.Tensor) -> None:
    """What ``nn.Parameter`` does to a tensor of another class, without a dispatch."""
    setattr(tensor, PARAMETER_MARK, True)
