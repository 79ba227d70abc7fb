"""Layers by their usual names that hold this rank's pieces of the parameters.

They compute with `local` pieces: in the dtype of compute, and as FSDP2 gathered them. A call moves
nothing; where ranks have other parts of the result, its arguments name the axis.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.pytorch.batch_norm import batch_norm
from autopar.runtime.pytorch.layers import Weights
from autopar.runtime.pytorch.norms import rms_norm
from autopar.runtime.pytorch.parameters import local
from autopar.runtime.pytorch.vocabulary import Axes, embedding

_CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


class Layer(Weights):
    """A layer of a ``weight`` and maybe a ``bias``."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__(weight=weight, bias=bias)

    def own(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias to compute with."""
        return local(self.weight), None if self.bias is None else local(self.bias)


class Linear(Layer):
    """``x weight^T + bias``: x [..., k], weight [n, k] -> [..., n]."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.own())


class Conv(Layer):
    """x [b, c, *s], weight [d, c / groups, *k] -> [b, d, *t], in one to three spatial dims;
    ``options`` are those of `torch.nn.functional.conv2d`."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None = None, **options: Any
    ) -> None:
        super().__init__(weight, bias)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return _CONVOLUTIONS[self.weight.dim()](x, *self.own(), **self.options)


class Embedding(Layer):
    """Rows of ``weight`` [v, d] by ids [...] -> [..., d]."""

    def __init__(self, weight: nn.Parameter, padding_idx: int | None = None) -> None:
        super().__init__(weight)
        self.padding_idx = padding_idx

    def forward(self, ids: Tensor, vocabulary: int = 0, axis: Axes = ()) -> Tensor:
        """``axis``: its ranks hold pieces of the ``vocabulary``; each gives a partial sum."""
        weight = local(self.weight)
        if axis:
            return embedding(ids, weight, vocabulary, axis, self.padding_idx)
        return F.embedding(ids, weight, self.padding_idx)


class LayerNorm(Layer):
    """Over the dims of ``weight``, which are the last ones of x."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None = None, eps: float = 1e-5
    ) -> None:
        super().__init__(weight, bias)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, *self.own(), self.eps)


class RMSNorm(Layer):
    """See `autopar.runtime.pytorch.norms.rms_norm`."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float = 0.0) -> None:
        super().__init__(weight)
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, local(self.weight), self.eps, self.offset)


class GroupNorm(Layer):
    """``groups``: those of this rank's channels."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter, groups: int, eps: float = 1e-5
    ) -> None:
        super().__init__(weight, bias)
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.groups, *self.own(), self.eps)


class BatchNorm(Weights):
    """See `autopar.runtime.pytorch.batch_norm.batch_norm`, also for ``axes``."""

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter,
        running_mean: nn.Buffer,
        running_var: nn.Buffer,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:
        super().__init__(
            weight=weight, bias=bias, running_mean=running_mean, running_var=running_var
        )
        self.momentum, self.eps = momentum, eps

    def forward(self, x: Tensor, axes: tuple[str, ...] = (), training: bool = True) -> Tensor:
        pieces = local(self.weight), local(self.bias), self.running_mean, self.running_var
        taken = training and self.training
        return batch_norm(x, *pieces, self.momentum, self.eps, axes, taken)
