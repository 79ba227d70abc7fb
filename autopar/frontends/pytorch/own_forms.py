"""Ops for which PyTorch has no other form, as calls of ops that rules are known for.

A form is called on the op's own arguments, all of them by the names in its schema. It gives what
the op gives, gradients too: what stands here differs from the op by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.torch_private.ops import OpOverload, op_name, overload_name, schema_of

Form = Callable[..., Any]


def own_form(target: OpOverload, args: Any, kwargs: Any) -> Form | None:
    """What computes the same as this call of ``target``, given as it was."""
    schema = schema_of(target).arguments
    given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    name = op_name(target)
    form = FORMS.get(f"{target.namespace}::{name}") or _alone(target, given) or _view(target)
    if form is None:
        return None
    named = form

    def call(*again: Any, **by_name: Any) -> Any:
        defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
        positions = dict(zip((a.name for a in schema), again, strict=False))
        return named(**{**defaults, **positions, **by_name})

    return call


# -- images without a batch -----------------------------------------------------------------------

_SPATIAL: Mapping[str, int] = {
    f"{name}{n}d": n
    for name in (
        "conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool",
        "max_unpool",
    )
    for n in (1, 2, 3)
} | {f"max_pool{n}d_with_indices": n for n in (2, 3)}  # fmt: skip
"""Ops over images [b, c, *s], which take [c, *s], too, and how many dims s are."""


def _alone(target: OpOverload, given: Mapping[str, Any]) -> Form | None:
    """An op over images that is given one without a batch: the same of a batch of one."""
    spatial = _SPATIAL.get(op_name(target)) if target.namespace == "aten" else None
    if spatial is None or len(next(iter(given.values())).shape) != spatial + 1:
        return None

    def form(**arguments: Any) -> Any:
        for name in ("self", "input", "indices"):
            if name in arguments:
                arguments[name] = arguments[name].unsqueeze(0)
        made = target(**arguments)
        return tuple(t.squeeze(0) for t in made) if isinstance(made, tuple) else made.squeeze(0)

    return form


# -- copies of views -----------------------------------------------------------------------------


def _view(target: OpOverload) -> Form | None:
    """``narrow`` for ``narrow_copy``: no memory is shared where nothing is written."""
    plain = without_copy(target)
    return None if plain is target else plain


def without_copy(target: Any) -> Any:
    """``diagonal`` for ``diagonal_copy``; itself of an op that is no such copy."""
    name = op_name(target) if getattr(target, "namespace", "") == "aten" else ""
    packet = getattr(torch.ops.aten, name.removesuffix("_copy"), None)
    if not name.endswith("_copy") or name.startswith("_") or packet is None:
        return target
    return getattr(packet, overload_name(target), target)


# -- the others -----------------------------------------------------------------------------------


def _addbmm(self: Tensor, batch1: Tensor, batch2: Tensor, beta: float, alpha: float) -> Any:
    return beta * self + alpha * torch.bmm(batch1, batch2).sum(0)


def _addmv(self: Tensor, mat: Tensor, vec: Tensor, beta: float, alpha: float) -> Any:
    return beta * self + alpha * torch.mv(mat, vec)


def _cholesky(self: Tensor, upper: bool) -> Any:
    return torch.linalg.cholesky(self, upper=upper)


def _dist(self: Tensor, other: Tensor, p: float) -> Any:
    return torch.linalg.vector_norm(self - other, p)


def _var_mean(self: Tensor, dim: Any = None, keepdim: bool = False, **how: Any) -> Any:
    correction = how["correction"] if "correction" in how else int(how["unbiased"])
    correction = 1 if correction is None else correction
    variance = torch.var(self, dim, correction=correction, keepdim=keepdim)
    return variance, torch.mean(self, dim, keepdim)


def _cholesky_solve(self: Tensor, input2: Tensor, upper: bool) -> Any:
    first = input2.mH if upper else input2
    between = torch.linalg.solve_triangular(first, self, upper=False)
    return torch.linalg.solve_triangular(first.mH, between, upper=True)


def _cholesky_inverse(self: Tensor, upper: bool) -> Any:
    whole = self.mH @ self if upper else self @ self.mH
    return torch.linalg.inv(whole)


def _triangular_solve(
    self: Tensor, A: Tensor, upper: bool, transpose: bool, unitriangular: bool
) -> tuple[Tensor, Tensor]:
    matrix, upper = (A.mT, not upper) if transpose else (A, upper)
    solved = torch.linalg.solve_triangular(matrix, self, upper=upper, unitriangular=unitriangular)
    return solved, A.clone()


def _take(self: Tensor, index: Tensor) -> Any:
    return torch.ops.aten.index.Tensor(self.reshape(-1), [index])


def _multi_margin_loss(
    self: Tensor, target: Tensor, p: float, margin: float, weight: Tensor | None, reduction: int
) -> Any:
    """At the margin there is no gradient: `relu`, where PyTorch's own other form has a clamp."""
    rows, labels = self.reshape(-1, self.shape[-1]), target.reshape(-1, 1)
    excess = functional.relu(margin - rows.gather(1, labels) + rows)
    if p == 2:
        excess = excess.square()
    if weight is not None:
        excess = excess * weight[labels]
    others = torch.arange(rows.shape[1], device=rows.device) != labels
    return _reduced((excess * others).mean(1), reduction, target.shape)


def _multilabel_margin_loss(self: Tensor, target: Tensor, reduction: int) -> Any:
    """Labels stand in front, and end where there is -1; the other result says where they are."""
    rows, labels = self.reshape(-1, self.shape[-1]), target.reshape(-1, self.shape[-1])
    given = (labels < 0).cumsum(1) == 0
    places = labels.clamp(min=0)
    hits = torch.zeros_like(rows).scatter_add(1, places, given.to(rows.dtype)) > 0
    excess = functional.relu(1 - rows.gather(1, places).unsqueeze(2) + rows.unsqueeze(1))
    pairs = given.unsqueeze(2) & ~hits.unsqueeze(1)
    losses = (excess * pairs).sum((1, 2)) / rows.shape[1]
    of_rows = self.shape[:-1]
    return _reduced(losses, reduction, of_rows), hits.to(rows.dtype).reshape(self.shape)


def _reduced(losses: Tensor, reduction: int, of_rows: torch.Size) -> Tensor:
    """As aten numbers them: none, mean, sum."""
    if reduction:
        return losses.mean() if reduction == 1 else losses.sum()
    return losses.reshape(of_rows)


def _rows_of_losses(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str = "none",
    label_smoothing: float = 0.0,
    **how: Any,
) -> Tensor:
    """The loss of `torch.nn.functional.linear_cross_entropy` with options, whose chunks are its own
    way to save memory: plans choose theirs."""
    del how
    logits = functional.linear(input, linear_weight, linear_bias)
    return functional.cross_entropy(
        logits,
        target,
        weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


def _loss_and_gradients(**arguments: Any) -> tuple[Tensor, ...]:
    """The same op for a mean or a sum gives gradients beside, which only its own backward reads."""
    return (_rows_of_losses(**arguments),) * 4


FORMS: Mapping[str, Form] = {
    "aten::addbmm": _addbmm,
    "aten::addmv": _addmv,
    "aten::dist": _dist,
    "aten::var_mean": _var_mean,
    "aten::cholesky": _cholesky,
    "aten::cholesky_solve": _cholesky_solve,
    "aten::cholesky_inverse": _cholesky_inverse,
    "aten::triangular_solve": _triangular_solve,
    "aten::take": _take,
    "aten::multi_margin_loss": _multi_margin_loss,
    "aten::multilabel_margin_loss_forward": _multilabel_margin_loss,
    "torch_nn::_linear_cross_entropy_batch_chunked": _loss_and_gradients,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": _rows_of_losses,
}
