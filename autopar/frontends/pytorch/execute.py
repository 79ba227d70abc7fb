"""One op of a graph run by torch on given numbers, for trials of rules (`autopar.rules.trial`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from autopar.frontends.shared.named_functions import function_at
from autopar.nouns.graph import Op, Tensor
from autopar.rules.own_functions import FUNCTION
from autopar.rules.trial import Array, CannotRun, Ran


def execute(
    op: Op,
    tensors: Mapping[str, Tensor],
    operands: Sequence[Array],
    cotangents: Sequence[Array | None],
    wide: bool,
) -> Ran:
    """`autopar.rules.trial.Execute` for ops that are one call of torch or of the user's own."""
    given = []
    for name, array in zip(op.inputs, operands, strict=True):
        value = torch.from_numpy(np.array(array))
        if value.is_floating_point():
            value = value.to(torch.float64 if wide else getattr(torch, tensors[name].dtype))
            value.requires_grad_(tensors[name].differentiable)
        given.append(value)
    # The op may be the user's own code, which may raise whatever it likes on drawn numbers.
    try:
        results = call_again(op, given, wide)
        flowing = [
            (r, torch.from_numpy(c).to(r.dtype))
            for r, c in zip(results, cotangents, strict=True)
            if c is not None and r.requires_grad
        ]
        leaves = [x for x in given if x.requires_grad]
        remaining = iter(
            torch.autograd.grad(
                [r for r, _ in flowing],
                leaves,
                [c for _, c in flowing],
                allow_unused=True,
                materialize_grads=True,
            )
            if flowing and leaves
            else [None] * len(leaves)
        )
    except Exception as error:
        raise CannotRun(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    gradients = [next(remaining) if x.requires_grad else None for x in given]
    return Ran(
        tuple(map(_array, results)), tuple(None if g is None else _array(g) for g in gradients)
    )


def call_again(op: Op, operands: Sequence[torch.Tensor], wide: bool) -> list[torch.Tensor]:
    """The tensors that the original call of ``op``, or its hand-written derivative, makes.

    ``wide``: in float64 what it computes in a narrower float. Raises ValueError where the op was
    made of other calls than one.
    """

    def argument(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("%"):
            return operands[int(value[1:])]
        if isinstance(value, str) and value.startswith("torch."):
            meant = getattr(torch, value.removeprefix("torch."))
            narrow = isinstance(meant, torch.dtype) and meant.is_floating_point
            return torch.float64 if wide and narrow else meant
        if isinstance(value, tuple | list):
            return [argument(v) for v in value]
        return value

    if FUNCTION in op.attrs:
        function = op.attrs[FUNCTION]
        own: Any = function_at(function["path"])
        made = own.apply(*[argument(a) for a in function["args"]])
    elif "torch" in op.attrs:
        original, target = op.attrs["torch"], torch.ops
        for part in original["target"].split("."):
            target = getattr(target, part)
        kwargs = {k: argument(v) for k, v in original["kwargs"].items()}
        made = target(*[argument(v) for v in original["args"]], **kwargs)  # type: ignore[operator]
    else:
        raise ValueError(f"{op.kind} at {op.source} was made of several calls of torch")
    results = made if isinstance(made, tuple | list) else (made,)
    return [t for t in results if isinstance(t, torch.Tensor)]


def _array(value: torch.Tensor) -> Array:
    value = value.detach()
    array: Array = (value.double() if value.is_floating_point() else value).numpy()
    return array
