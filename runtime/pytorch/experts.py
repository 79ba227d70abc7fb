"""The experts of a layer: every token goes through the few that its route names.

Tokens are put in order of their experts, each of which multiplies its own in one product. All
matrices get a gradient, of zeros where no token came: ranks add up their gradients, and what is not
used on one may be on another.

Where several axes split experts, the mesh's outermost cuts first. An axis may split f beside them
in other forms (or with "halves" each half apart, so that a piece has a gate and what it gates): the
result is then a sum over it too, for which ``down_bias`` must be None.

What a block recomputes sends the same rows as long as ``index`` is the same: it is an input here,
and who makes it again must make it alike (`recompute`'s ``keep_routes``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.pytorch.accelerators import multiplies_groups
from autopar.runtime.pytorch.dispatch import Axes, Going, Routes, inverse, routes_of_each
from autopar.runtime.pytorch.expert_places import holder_of, in_places
from autopar.runtime.pytorch.halves import traded
from autopar.runtime.pytorch.routed_rows import is_noting
from autopar.runtime.shared.settings import ProgramError


@torch.compiler.disable  # type: ignore[untyped-decorator]
def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    gate: Callable[..., Tensor],
    reads: str = "halves",
    transposed: bool = False,
    held: Axes = (),
    dispatch: Axes = (),
    halves: Axes = (),
    pieces: int = 1,
    layer: nn.Module | None = None,
    beside: Callable[[], Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``sum_k weights[n, k] * (gate(x[n] up[e]^T + up_bias[e]) down[e]^T + down_bias[e])`` for
    each token n, with ``e = index[n, k]``.

    x [n, d], index [n, k] of integers below e, weights [n, k], up [e, g, d], down [e, d, f],
    up_bias [e, g], down_bias [e, d] -> [n, d] in the dtype of x.

    gate:       from [rows, g] to [rows, f], element by element. Where it ``reads`` "all" it is
                called with the whole; with "halves" (g = 2 f) with its two halves, with "pairs"
                with its even and its odd entries. It may compute in a wider dtype.
    transposed: matrices are up [e, d, g] and down [e, f, d].
    held:       axes that split the experts while tokens are whole: matrices and biases are this
                rank's piece, and so is the result, of a sum over ``held``: routes to the others'
                experts are zeros in it, and nothing is computed for them. The gradients of x and
                weights are partial sums likewise.
    dispatch:   axes that split both: x, index and weights are this rank's own tokens, matrices and
                biases its piece of the experts, whose numbers in ``index`` are those of the whole.
                Rows go to their experts' ranks and back (`autopar.runtime.pytorch.dispatch`), and
                every rank calls, in backward too, even without tokens or rows.
    halves:     an axis that splits the matrices by contiguous columns, up [e, g / n, d] and down
                [e, d, f / n], where ``reads`` is "halves": rank i of n has columns of gates or of
                what they gate alone, and trades what they give for both of its own f / n. The
                result is of a sum over the axis, and biases must be None.
    pieces:     of the tokens, one after the other: while rows of one travel, those of another are
                computed with, in backward too.
    layer:      the module that holds the matrices, where its experts are placed
                (`autopar.runtime.pytorch.expert_places`): a rank's piece is by place, and ``index``
                has the model's numbers all the same.
    beside:     runs while the first tokens are on their way out, in backward while their gradients
                are on their way home; what it gives is returned behind the result.
    """
    _check_pieces(up, down, up_bias, down_bias)

    def computed(h: Tensor, routes: Routes) -> Tensor:
        h = _products(h, routes.rows, up, up_bias, transposed)
        h = traded(h, halves, routes.share) if halves else h
        h = gate(*_parts(h, reads)).to(x.dtype)
        return _products(h, routes.rows, down, down_bias, transposed)

    cut = [t.tensor_split(pieces) for t in (x, in_places(index, layer), weights)]
    holder = holder_of(up) if layer is None and is_noting() else layer
    each = routes_of_each(cut[1], len(up), held, dispatch, holder)
    return _in_pieces([*zip(*cut, strict=True)], each, computed, beside)


def _in_pieces(
    tokens: Sequence[tuple[Tensor, Tensor, Tensor]],
    each: Sequence[Routes],
    computed: Callable[[Tensor, Routes], Tensor],
    beside: Callable[[], Tensor] | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What experts make of all pieces of the tokens, each x [n, d], index and weights [n, k]; what
    is made beside them.

    Autograd runs what was called last first: gradients of the last piece travel while none is
    computed with, those of each other one beside the computation of the one behind it.
    """

    def set_out(i: int) -> Going:
        x, index, _ = tokens[i]
        return each[i].set_out(x[each[i].chosen // index.shape[1]])

    going, back = [set_out(0)], []
    also = beside() if beside is not None else None
    for i, routes in enumerate(each):
        if i + 1 < len(each):
            going.append(set_out(i + 1))
        back.append(routes.set_back(computed(routes.arrive(going[i]), routes)))
    made = [
        _weighted(routes.come_home(h), routes, *token)
        for h, routes, token in zip(back, each, tokens, strict=True)
    ]
    result = torch.cat(made) if len(made) > 1 else made[0]
    return result if also is None else (result, also)


def _weighted(h: Tensor, routes: Routes, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Of what came home for each route, [s, d] -> [n, d]: the sum over a token's experts."""
    h = h * weights.reshape(-1)[routes.chosen].unsqueeze(-1)
    if routes.whole:
        h = h.index_select(0, inverse(routes.chosen))
    else:  # zeros where a route is another rank's
        h = h.new_zeros(index.numel(), h.shape[1]).index_copy(0, routes.chosen, h)
    return h.view(*index.shape, h.shape[1]).sum(1).to(x.dtype)


def _check_pieces(up: Tensor, down: Tensor, *biases: Tensor | None) -> None:
    """Raises `ProgramError` where not all are of the same experts."""
    numbers = [len(t) for t in (up, down, *biases) if t is not None]
    if len(set(numbers)) > 1:
        raise ProgramError(
            f"experts: matrices and biases are of {numbers} experts: where an axis splits experts, "
            "it splits dim 0 of all of them"
        )


def _parts(h: Tensor, reads: str) -> Sequence[Tensor]:
    if reads == "all":
        return (h,)
    return h.chunk(2, dim=-1) if reads == "halves" else (h[:, 0::2], h[:, 1::2])


def _products(
    x: Tensor, rows: Tensor, matrices: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    """The first ``rows[0]`` rows of x [s, i] times the first matrix [o, i], and so on: [s, o]."""
    if not _has_kernel(x, matrices):
        # Without values, as if all routes named the first.
        numbers = [len(x), *[0] * (len(rows) - 1)] if rows.is_meta else rows.tolist()
        return one_by_one(x, numbers, matrices, bias, transposed)
    return _at_once(x, rows, matrices, bias, transposed)


def _has_kernel(x: Tensor, matrices: Tensor) -> bool:
    """Whether torch's kernel for products of groups takes them: on GPUs from Ampere on, in
    bfloat16, where rows and matrices begin at multiples of 16 bytes."""
    alike = x.dtype is matrices.dtype is torch.bfloat16 and len(x) > 0
    aligned = all(n % 8 == 0 for n in matrices.shape[1:])
    return alike and aligned and multiplies_groups(x.device)


def _at_once(
    x: Tensor, rows: Tensor, matrices: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    """`one_by_one` in one kernel; the host does not wait for the numbers of rows."""
    ends = rows.cumsum(0, dtype=torch.int32)
    made = F.grouped_mm(x, matrices if transposed else matrices.transpose(1, 2), offs=ends)
    if bias is None:
        return made
    which = torch.arange(len(rows), device=x.device)
    return made + bias[which.repeat_interleave(rows, output_size=len(x))]


def one_by_one(
    x: Tensor, rows: Sequence[int], matrices: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    """A product for each matrix that has rows.

    Matrices that multiply nothing come into the gradient as zeros, by `unbind`, as long as one
    multiplies something: the first does where there are no rows.
    """
    each = matrices.unbind()
    added = [None] * len(each) if bias is None else bias.unbind()
    used = [i for i, n in enumerate(rows) if n] or [0]
    parts = torch.split(x, [rows[i] for i in used])
    made = [
        F.linear(part, each[i].t() if transposed else each[i], added[i])
        for i, part in zip(used, parts, strict=True)
    ]
    return torch.cat(made)
