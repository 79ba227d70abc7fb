"""Random small calls of PyTorch ops that have no kind: lookups, counts and products by index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.rules.drawing import Draw

Made = tuple[tuple[Tensor, ...], dict[str, Any]]


def _call(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"torch": {"args": args, "kwargs": kwargs}}


def _histogram(d: Draw, kind: str) -> Made:
    """Values outside of the range count nowhere; without a range it is that of the values."""
    del kind
    bounds = d.of((0, 1), (0, 0.6), (0, 0))
    return (d.real(*d.shape(), gradient=False),), _call("%0", d.of(1, 3, 4), *bounds)


def _index_put(d: Draw, kind: str) -> Made:
    """Different places for different values, unless they are added up."""
    del kind
    shape = d.shape(1, 3)
    dim, adds = d.dim(shape) % len(shape), d.flag()
    count = d.size() if adds else max(shape[dim] - 1, 1)
    order = torch.randperm(shape[dim], generator=d.generator)[:count]
    places = d.ids(shape[dim], count) if adds else order
    indices: list[str | None] = [None] * dim + ["%1"]
    values = d.real(*shape[:dim], count, *shape[dim + 1 :]) if d.flag() else d.real(1)
    if dim and d.flag():  # two dims, and numbers for the pairs of them
        indices[dim - 1] = "%2"
        first = torch.zeros(count, dtype=torch.long)
        added = d.real(*shape[: dim - 1], count, *shape[dim + 1 :])
        return (d.real(*shape), places, first, added), _call(
            "%0", [*indices[: dim - 1], "%2", "%1"], "%3", adds
        )
    return (d.real(*shape), places, values), _call("%0", indices, "%2", adds)


def _index_add(d: Draw, kind: str) -> Made:
    del kind
    shape = d.shape()
    dim, count = d.dim(shape), d.size()
    source = list(shape)
    source[dim] = count
    operands = (d.real(*shape), d.ids(shape[dim], count), d.real(*source))
    return operands, _call("%0", dim, "%1", "%2")


def _scatter_add(d: Draw, kind: str) -> Made:
    del kind
    shape = d.shape()
    dim = d.dim(shape)
    smaller = [n if d.flag() else max(n - 1, 1) for n in shape]
    smaller[dim] = d.size()
    operands = (d.real(*shape), d.ids(shape[dim], *smaller), d.real(*smaller))
    return operands, _call("%0", dim, "%1", "%2")


def _scatter_reduce(d: Draw, kind: str) -> Made:
    (x, index, source), call = _scatter_add(d, kind)
    reduction = d.of("sum", "mean", "amax", "amin")
    args = (*call["torch"]["args"], reduction)
    return (x, index, source), _call(*args, include_self=d.flag())


def _index_reduce(d: Draw, kind: str) -> Made:
    operands, call = _index_add(d, kind)
    reduction = d.of("prod", "mean", "amax", "amin")
    return operands, _call(*call["torch"]["args"], reduction, include_self=d.flag())


def _diagonal_scatter(d: Draw, kind: str) -> Made:
    del kind
    x, offset = d.real(d.size(), *d.shape(2, 3)), d.of(-1, 0, 1)
    dims = d.of((-2, -1), (1, 2), (2, 1))
    source = d.real(*x.diagonal(offset, *dims).shape)
    return (x, source), _call("%0", "%1", offset, *dims)


def _masked_scatter(d: Draw, kind: str) -> Made:
    del kind
    shape = d.shape()
    mask = d.real(*shape, gradient=False) > 0.5
    return (d.real(*shape), mask, d.real(*shape)), _call("%0", "%1", "%2")


def _sampled(d: Draw, kind: str) -> Made:
    n, deep = d.size(), int(kind[-2]) - 2
    grid = d.real(n, d.size(), d.size(), *[2] * deep, 2 + deep) * 1.6 - 1.2
    x = d.real(n, d.size(), *[2] * deep, d.of(3, 4), d.of(3, 5))
    return (x, grid), _call("%0", "%1", d.of(0, 1), d.of(0, 1, 2), d.flag())


def _over(d: Draw, kind: str) -> Made:
    """Numbers that all differ, so that one of them is the median, or what is asked for."""
    shape = d.shape()
    x, dim = d.real(*shape), d.dim(shape)
    if kind == "aten::std_mean":
        dims = list(d.dims(shape))
        shape = tuple(max(n, 2) if i in dims else n for i, n in enumerate(shape))
        return (d.real(*shape),), _call("%0", dims, correction=d.of(0, 1), keepdim=d.flag())
    if kind == "aten::aminmax":
        return (x,), _call("%0", dim=d.of(dim, None), keepdim=d.flag())
    if kind == "aten::prod" and d.flag():
        return (x,), _call("%0")
    if kind == "aten::mode" and d.flag():
        return (x,), _call("%0", keepdim=d.flag())
    return (x,), _call("%0", dim, d.flag())


def _decomposed(d: Draw, kind: str) -> Made:
    """Matrices whose values, of which none is near another, say how they are taken apart."""
    lead, n = d.of((), (d.size(),), (d.size(), d.small())), d.of(2, 3)
    x = d.signed(*lead, n, n).detach() * 0.1
    x = (x + x.mT) / 2 + torch.diag(torch.arange(1.0, n + 1, dtype=x.dtype))
    given = {"aten::_linalg_eigh": ("L", True), "aten::_linalg_svd": (False, True)}
    return (x.requires_grad_(),), _call("%0", *given.get(kind, ()))


def _distances(d: Draw, kind: str) -> Made:
    del kind
    lead = d.of((), (d.size(),), (d.size(), d.small()))
    m = d.size()
    return (d.real(*lead, d.small(), m), d.signed(*lead, d.size(), m)), _call(
        "%0", "%1", d.of(1.0, 2.0)
    )


def _pool(d: Draw, kind: str) -> Made:
    spatial = int(kind[-2])
    x = d.real(d.size(), d.size(), *(d.of(4, 5) for _ in range(spatial)))
    return (x,), _call("%0", [2] * spatial, [], [0] * spatial, True, d.flag())


def _largest(d: Draw, kind: str) -> Made:
    """Windows side by side, or where numbers for each image and channel say."""
    spatial = int(kind.split("d_with")[0][-1]) if "with" in kind else int(kind[-2])
    x = d.real(d.size(), d.size(), *(d.of(4, 5) for _ in range(spatial)))
    if "fractional" not in kind:
        return (x,), _call("%0", [2] * spatial)
    given = d.real(*x.shape[:2], spatial, gradient=False)
    return (x, given), _call("%0", [2] * spatial, [2] * spatial, "%1")


def _resized(d: Draw, kind: str) -> Made:
    del kind
    return (d.real(d.size(), d.size(), 4, 5),), _call("%0", [d.of(2, 3, 7), 3], d.flag())


def _grouped_product(d: Draw, kind: str) -> Made:
    """Some experts have no rows."""
    del kind
    experts, k, n = d.small(), d.size(), d.size()
    counts = d.ids(3, experts)
    rows = max(int(counts.sum()), 1)
    counts[-1] += rows - counts.sum()
    return (d.real(rows, k), d.real(experts, k, n), counts.cumsum(0)), _call("%0", "%1", "%2")


def _scan(d: Draw, kind: str) -> Made:
    del kind
    shape = d.shape()
    return (d.real(*shape),), _call("%0", d.dim(shape))


def _windows(d: Draw, kind: str) -> Made:
    del kind
    shape = [*d.shape()]
    dim = d.dim(shape)
    shape[dim] = d.of(4, 5)
    return (d.real(*shape),), _call("%0", dim, d.of(1, 2, 3), d.of(1, 2))


def _adaptive(d: Draw, kind: str) -> Made:
    spatial = int(kind[-2])
    x = d.real(d.size(), d.size(), *(d.of(4, 5) for _ in range(spatial)))
    return (x,), _call("%0", [d.of(1, 2, 3)] * spatial)


def _matrices(d: Draw, kind: str) -> Made:
    """Far from singular, and those to be decomposed symmetric."""
    lead, n = d.of((), (d.size(),), (d.size(), d.small())), d.size()
    x = d.signed(*lead, n, n).detach() * 0.3
    if kind == "aten::linalg_cholesky_ex":
        x = x @ x.mT
    return ((x + torch.eye(n, dtype=x.dtype) * 2).requires_grad_(),), _call("%0")


def _solved(d: Draw, kind: str) -> Made:
    """Right sides behind the matrices or in front."""
    (x,), _ = _matrices(d, kind)
    *lead, n, _ = x.shape
    left = d.flag()
    sides = d.signed(*lead, n, d.size()) if left else d.signed(*lead, d.size(), n)
    return (x, sides), _call("%0", "%1", left=left)


def _solved_triangle(d: Draw, kind: str) -> Made:
    operands, call = _solved(d, kind)
    return operands, _call("%0", "%1", upper=d.flag(), **call["torch"]["kwargs"])


def _factored(d: Draw, kind: str) -> Made:
    """Factors of matrices far from singular, rows in the order that they have."""
    (x,), _ = _matrices(d, kind)
    *lead, n, _ = x.shape
    order = torch.arange(1, n + 1, dtype=torch.int32).expand(*lead, n).contiguous()
    scales = d.real(*lead, n)
    match kind.removeprefix("aten::"):
        case "lu_unpack":
            return (x, order), _call("%0", "%1")
        case "linalg_lu_solve":
            return (x, order, d.signed(*lead, n, d.size())), _call("%0", "%1", "%2")
        case "linalg_householder_product":
            return (x, scales), _call("%0", "%1")
    return (x,), _call("%0")


def _placed(d: Draw, kind: str) -> Made:
    row, x = d.real(d.of(1, 4), gradient=False).sort().values, d.real(*d.shape(), gradient=False)
    operands = (row, x) if kind == "aten::searchsorted" else (x, row)
    return operands, _call("%0", "%1", right=d.flag())


def _pairs(d: Draw, kind: str) -> Made:
    del kind
    return (d.signed(d.of(2, 3, 4), d.size()),), _call("%0", 2.0)


TORCH_CASES = {
    **dict.fromkeys(("aten::cummax", "aten::cummin", "aten::logcumsumexp"), _scan),
    **{f"aten::adaptive_max_pool{n}d": _adaptive for n in (2, 3)},
    "aten::unfold": _windows,
    **{f"aten::linalg_{name}": _matrices for name in ("matrix_exp", "inv_ex", "cholesky_ex")},
    "aten::_linalg_solve_ex": _solved,
    **dict.fromkeys(("aten::bucketize", "aten::searchsorted"), _placed),
    "aten::_pdist_forward": _pairs,
    "aten::histc": _histogram,
    "aten::index_put": _index_put,
    "aten::index_add": _index_add,
    "aten::index_reduce": _index_reduce,
    "aten::diagonal_scatter": _diagonal_scatter,
    "aten::masked_scatter": _masked_scatter,
    "aten::scatter_add": _scatter_add,
    "aten::scatter_reduce": _scatter_reduce,
    **{f"aten::grid_sampler_{n}d": _sampled for n in (2, 3)},
    **{f"aten::{name}": _over for name in "prod median nanmedian mode std_mean aminmax".split()},
    **{f"aten::max_pool{n}d_with_indices": _largest for n in (2, 3)},
    **{f"aten::fractional_max_pool{n}d": _largest for n in (2, 3)},
    **{f"aten::_upsample_{name}_aa": _resized for name in ("bilinear2d", "bicubic2d")},
    "aten::linalg_solve_triangular": _solved_triangle,
    **{
        f"aten::{name}": _factored
        for name in (
            "linalg_lu_factor_ex linalg_lu lu_unpack linalg_lu_solve linalg_householder_product "
            "linalg_pinv"
        ).split()
    },
    **{
        f"aten::{name}": _decomposed
        for name in "_linalg_det _linalg_slogdet _linalg_eigh _linalg_svd linalg_qr".split()
    },
    "aten::cdist": _distances,
    **{f"aten::avg_pool{n}d": _pool for n in (1, 2, 3)},
    "transformers::grouped_mm_fallback": _grouped_product,
}
