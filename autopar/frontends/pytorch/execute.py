"""One op of a graph run by torch on given numbers, for trials of rules (`autopar.rules.trial`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from autopar.frontends.pytorch.interpret import run_op
from autopar.nouns.graph import Op, Tensor
from autopar.rules.trial import Array, CannotRun, Ran


def execute(
    op: Op,
    tensors: Mapping[str, Tensor],
    operands: Sequence[Array],
    cotangents: Sequence[Array | None],
    wide: bool,
) -> Ran:
    """`autopar.rules.trial.Execute` for ops that the PyTorch frontend captured."""
    given = []
    for name, array in zip(op.inputs, operands, strict=True):
        value = torch.from_numpy(np.array(array))
        if value.is_floating_point():
            value = value.to(torch.float64 if wide else getattr(torch, tensors[name].dtype))
            value.requires_grad_(tensors[name].differentiable)
        given.append(value)
    # The op may be the user's own code, which may raise whatever it likes on drawn numbers.
    try:
        results = run_op(op, given, [tensors[n] for n in op.outputs], wide=wide)
        flowing = [
            (r, torch.from_numpy(c).to(r.dtype))
            for r, c in zip(results, cotangents, strict=True)
            if c is not None and r.requires_grad
        ]
        leaves = [x for x in given if x.requires_grad]
        found = iter(
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
    gradients = [next(found) if x.requires_grad else None for x in given]
    return Ran(
        tuple(map(_array, results)), tuple(None if g is None else _array(g) for g in gradients)
    )


def _array(value: torch.Tensor) -> Array:
    value = value.detach()
    found: Array = (value.double() if value.is_floating_point() else value).numpy()
    return found
