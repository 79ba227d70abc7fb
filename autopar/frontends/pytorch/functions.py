"""`torch.autograd.Function` in a forward: a trace sees its forward only.

A hand-written backward that computes the true derivative (BLOOM's GELU does) loses nothing; one
that does not, like a straight-through estimator, would be replaced in silence. So the two are
compared on small random tensors, and what differs or cannot be run is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopar.frontends.pytorch.errors import UnsupportedOpError
from autopar.runtime.torch_private import without_modes, without_torch_function

SMALL = 3  # extent of a dim in the comparison; 1 stays 1


@contextmanager
def checked_functions() -> Iterator[None]:
    """Inside, `Function.apply` raises `UnsupportedOpError` for a backward that is not derived."""
    function: Any = torch.autograd.Function
    plain = vars(function)["apply"]
    known: set[type] = set()

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == "torch.utils.checkpoint":
            raise UnsupportedOpError(
                "the forward uses reentrant checkpointing: pass use_reentrant=False, or leave "
                "recomputation to the plan"
            )
        if cls not in known and not cls.__module__.startswith("torch."):
            if not _is_derivative(cls, plain, args):
                raise UnsupportedOpError(
                    f"{cls.__module__}.{cls.__qualname__} has a backward of its own "
                    "(torch.autograd.Function) that is not the derivative of its forward, and a "
                    "capture sees the forward only: wrap it as a custom op with "
                    "torch.library.custom_op and register_autograd"
                )
            known.add(cls)
        return plain.__get__(None, cls)(*args, **kwargs)

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = plain


def _is_derivative(cls: Any, plain: Any, args: tuple[Any, ...]) -> bool:
    """Whether its gradients are those of its forward, on random tensors with small dims."""
    with without_modes(), without_torch_function():
        generator = torch.Generator().manual_seed(0)
        values = [_sample(a, generator) if isinstance(a, torch.Tensor) else a for a in args]
        wanted = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
        try:
            with torch.enable_grad():
                own = plain.__get__(None, cls)(*values)
                direct = _forward(cls, values)
            results = [
                torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
                for out in (own, direct)
            ]
        except Exception:  # a user's function on shapes of our own: whatever it raises
            return False
        return all(
            (a is None and b is None)
            or (a is not None and b is not None and torch.allclose(a, b, rtol=1e-6, atol=1e-9))
            for a, b in zip(*results, strict=True)
        )


def _sample(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shape = [min(n, SMALL) for n in tensor.shape]
    if not tensor.dtype.is_floating_point:
        return torch.zeros(shape, dtype=tensor.dtype)
    made = torch.randn(shape, dtype=torch.float64, generator=generator)
    return made.requires_grad_()


class _Context:
    """Stands in for ``ctx`` where autograd itself is to find the backward."""

    def save_for_backward(self, *tensors: Any) -> None: ...

    def save_for_forward(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def _forward(cls: Any, values: list[Any]) -> Any:
    separate = cls.setup_context is not torch.autograd.Function.setup_context
    return cls.forward(*values) if separate else cls.forward(_Context(), *values)
