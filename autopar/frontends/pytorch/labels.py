"""What stands for each tensor that a layer's forward meets: equal where two layers agree."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol

import torch

from autopar.frontends.pytorch.build import SMALL
from autopar.torch_private.modes import FakeTensor, without_modes, without_torch_function


class Origin(Protocol):
    """A tensor of the model under its first full name."""

    @property
    def name(self) -> str: ...


class Labels:
    """What stands for each tensor that a forward meets: equal where two layers agree.

    A number for arguments and results, in order; for the layer's own tensors their name relative
    to it; the full name of other tensors of the model; the value of a small real tensor.

    path, shared: the layer's module path, and full names of tensors not its own.
    """

    def __init__(
        self,
        path: str,
        shared: frozenset[str],
        named: Mapping[int, Origin],
        given: list[torch.Tensor],
    ) -> None:
        self._prefix, self._shared, self._named = f"{path}.", shared, named
        self._labels: dict[int, Hashable] = {id(t): i for i, t in enumerate(given)}
        self.tensors: dict[Hashable, torch.Tensor] = dict(enumerate(given))
        self._real: dict[int, tuple[int, torch.Tensor]] = {}
        self._next = len(given)

    def of(self, tensor: torch.Tensor) -> Hashable | None:
        """None for a tensor whose origin is not known."""
        label = self._labels.get(id(tensor))
        if label is not None:
            return label
        origin = self._named.get(id(tensor))
        if origin is None:
            return None if isinstance(tensor, FakeTensor) else self._valued(tensor)
        own = origin.name.startswith(self._prefix) and origin.name not in self._shared
        label = ("own", origin.name.removeprefix(self._prefix)) if own else ("model", origin.name)
        self._keep(label, tensor)
        return label

    def new(self, tensor: torch.Tensor) -> int:
        """The label of a result; results are numbered as they come."""
        self._next += 1
        self._keep(self._next - 1, tensor)
        return self._next - 1

    def known(self, tensor: torch.Tensor) -> Hashable | None:
        return self._labels.get(id(tensor))

    def _keep(self, label: Hashable, tensor: torch.Tensor) -> None:
        self._labels[id(tensor)] = label
        self.tensors[label] = tensor  # alive, so that its id stays its own

    def _valued(self, tensor: torch.Tensor) -> Hashable | None:
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() > SMALL:
            return None
        place, _ = self._real.setdefault(id(tensor), (len(self._real), tensor))
        with without_modes(), without_torch_function():
            value = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            shown = repr(value.detach().tolist())
        return ("value", place, tuple(tensor.shape), tensor.stride(), tensor.dtype, shown)
