"""Every import of a private torch module, in one place: what a new torch may move stands here.

One import a line, with the reason. Tests import this module alone, so that a move names itself.
"""

import torch
import torch.distributed._functional_collectives  # registers the ops named at the end
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)  # noqa: E501  a value was asked of a fake tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException  # noqa: E501  a shape would depend on values
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,
)  # a tensor with a device and no memory
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # ops on fake tensors

functional_collectives = torch.ops._c10d_functional  # collectives that compile, seen by modes
