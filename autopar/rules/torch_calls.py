"""PyTorch ops that have no kind of their own and are called again as they were: the table of their
rules, and those of them that are about no family of calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.nouns.graph import Op, Tensor
from autopar.rules.elementwise import TRANSCENDENTAL
from autopar.rules.images import (
    conv_transpose,
    first_dim,
    most_of_windows,
    pooled,
    resized,
    windows_of_dim,
)
from autopar.rules.index_writes import (
    add_at,
    index_put,
    reduce_at,
    scatter_add,
    scatter_reduce,
)
from autopar.rules.kept_whole import whole_rule
from autopar.rules.notation import Rule, RuleMaker
from autopar.rules.recurrent import cell, recurrent
from autopar.rules.terms import letters, positive, text
from autopar.rules.torch_arguments import argument, dim_argument

POINTWISE = "pointwise"
"""The attr of an op without a kind that PyTorch itself calls pointwise."""


def pointwise_rule(operands: int, results: int) -> Rule:
    """Of an op of which no more is known than that: all that it reads and makes is saved."""
    return Rule(
        f"{', '.join(['...~'] * operands)} -> {', '.join(['...~'] * results)}",
        saves=tuple(range(operands)),
        saves_results=tuple(range(results)),
        flops=TRANSCENDENTAL,
        backward=float(operands),
    )


def _along(
    place: int, saves_results: tuple[int, ...] = (), saves: tuple[int, ...] = ()
) -> RuleMaker:
    """An op that works along one dim, which stays whole; every tensor has its own extent of it."""

    def make(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
        rank = len(operands[0].shape)
        dim, names = dim_argument(op, place, rank), letters(rank)
        terms = [
            [f"{n}_{i}!" if d == dim else n for d, n in enumerate(names)]
            for i in range(len(operands) + len(results))
        ]
        count = len(operands)
        return Rule(
            text(terms[:count], terms[count:]),
            saves=saves,
            saves_results=saves_results,
            cost="reduction",
        )

    return make


def _over(
    place: int, saves: tuple[int, ...], saves_results: tuple[int, ...], usual: int | None = None
) -> RuleMaker:
    """An op over one dim or several, ``usual`` or all where the call names none; they stay whole,
    and are gone from every result or one long."""

    def make(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
        rank = len(operands[0].shape)
        given = argument(op, place, "dim", usual)
        listed = (
            range(rank) if given is None else given if isinstance(given, tuple | list) else (given,)
        )
        dims = {positive(int(d), rank) for d in listed}
        names, kept = letters(rank), len(results[0].shape) == rank
        left = [f"{n}!" if i in dims else n for i, n in enumerate(names)]
        right = ["1" if i in dims else n for i, n in enumerate(names) if kept or i not in dims]
        return Rule(
            text([left], [right] * len(results)),
            saves=saves,
            saves_results=saves_results,
            flops=2.0,
            cost="reduction",
        )

    return make


def _diagonal(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """diagonal(x, offset, dim1, dim2): two dims become one, which comes last."""
    del results
    rank = len(operands[0].shape)
    dims = [positive(int(argument(op, 2 + i, f"dim{1 + i}", i)), rank) for i in range(2)]
    names = letters(rank)
    left = [f"{n}!" if i in dims else n for i, n in enumerate(names)]
    right = [n for i, n in enumerate(names) if i not in dims]
    return Rule(text([left], [[*right, "diagonal!"]]), flops=0.0)


def _lerp(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """lerp(a, b, weight): a given number as the weight keeps nothing for backward."""
    saves = ""
    if len(operands) == 3:
        saves = "012" if operands[2].differentiable else "2"
    return _pointwise(saves)(op, operands, results)


def _baddbmm(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """The first operand is added to the product, once: k cannot leave partial sums."""
    del op, results
    saves = tuple(i for i, other in ((1, 2), (2, 1)) if operands[other].differentiable)
    rule = "b m n, b m k!, b k! n -> b m n"
    return Rule(rule, saves=saves, flops=2.0, backward=2.0, cost="matmul")


def _pointwise(saves: str) -> RuleMaker:
    """Element by element, operands broadcast; saved are operands by number, and y, the result."""

    def make(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
        del op, results
        count = len(operands)
        return Rule(
            f"{', '.join(['...~'] * count)} -> ...~",
            saves=tuple(i for i in range(count) if str(i) in saves),
            saves_results=(0,) if "y" in saves else (),
            flops=TRANSCENDENTAL,
            backward=float(count),
        )

    return make


def _divergence(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """kl_div(input, target): linear in the input, which only the target's gradient needs."""
    rule = _pointwise("01" if operands[1].differentiable else "1")
    return rule(op, operands, results)


def _cosine(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """cosine_similarity(x, y, dim): operands broadcast, ``dim`` stays whole and is gone."""
    rank = max(len(t.shape) for t in operands)
    place, names = positive(int(argument(op, 2, "dim", 1)), rank), letters(rank)
    terms = [
        [
            "1" if n == 1 and name != names[place] else name + "!" * (name == names[place])
            for name, n in zip(names[rank - len(t.shape) :], t.shape, strict=True)
        ]
        for t in operands
    ]
    kept = [n for i, n in enumerate(names) if i != place]
    right = ["1" if n == 1 else name for name, n in zip(kept, results[0].shape, strict=True)]
    return Rule(text(terms, [right]), saves=(0, 1), flops=6.0, backward=2.0, cost="reduction")


def _matrices(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Square matrices [..., n, n], each for itself, to matrices, or to numbers where it failed."""
    names = letters(len(operands[0].shape) - 2)
    ends: tuple[list[str], list[str]] = (["m!", "n!"], [])
    right = [[*names, *ends[len(t.shape) < len(operands[0].shape)]] for t in results]
    n = operands[0].shape[-1]
    return Rule(
        text([[*names, "m!", "n!"]], right),
        saves=(0,) if op.kind.endswith("exp") else (),
        saves_results=() if op.kind.endswith("exp") else (0,),
        flop_terms=((float(n), ("m", "n", *names)),),
        backward=2.0,
        cost="reduction",
    )


def _solved(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Square matrices [..., n, n] and right sides [..., n, k], each pair for itself; the factors of
    the matrices beside. Right sides that are rows, vectors, or of fewer matrices: whole."""
    matrices, sides = (t.shape for t in operands)
    kept = (0, 1, 2)[: len(results)]
    if matrices[:-1] != sides[:-1] or len(sides) < 2 or not argument(op, 2, "left", True):
        return replace(whole_rule(operands, results), saves=(0,), saves_results=kept)
    names = letters(len(matrices) - 2)
    ends: tuple[list[str], ...] = (["m!", "k!"], ["m!", "n!"], ["m!"], [])
    right = [[*names, *end] for end in ends[: len(results)]]
    return Rule(
        text([[*names, "m!", "n!"], [*names, "m!", "k!"]], right),
        saves=(0,),
        saves_results=kept,
        flop_terms=((float(matrices[-1]), ("m", "n", *names)), (2.0, ("m", "n", "k", *names))),
        backward=2.0,
        cost="reduction",
    )


def _placed(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """searchsorted(sorted, x), bucketize(x, sorted): each number's place in one whole row."""
    row = 0 if op.kind.endswith("searchsorted") else 1
    given = len(operands) == 2 and results[0].shape == operands[1 - row].shape
    if not given or len(operands[row].shape) != 1:  # a number's place, or one by another order
        return whole_rule(operands, results)
    names = letters(len(operands[1 - row].shape))
    terms = [["sorted!"], names] if row == 0 else [names, ["sorted!"]]
    return Rule(text(terms, [names]), flops=8.0)


def _prelu(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """One slope for all, or one for each channel of dim 1."""
    del op, results
    names = letters(len(operands[0].shape))
    slope = [names[1] if operands[1].numel > 1 else "1"][: len(operands[1].shape)]
    return Rule(text([names, slope], [names]), saves=(0, 1), backward=2.0)


def _histogram(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """histc(x, bins, min, max): counts add up, unless the range is that of the values at hand."""
    if argument(op, 2, "min", 0) == argument(op, 3, "max", 0):
        return whole_rule(operands, results)
    counted = [f"{n}+" for n in letters(len(operands[0].shape))]
    return Rule(text([counted], [["bins!"]]), cost="reduction")


def _of_matrices(operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> str | None:
    """Matrices [..., m, n], each for itself, and what belongs to them, to what they are made of;
    numbers are for all. None where operands are of fewer matrices."""
    lead = operands[0].shape[:-2]
    if any(t.shape and t.shape[: len(lead)] != lead for t in (*operands, *results)):
        return None
    terms = [
        [*letters(len(lead)), *(f"r{i}_{d}!" for d in range(len(t.shape) - len(lead)))]
        if t.shape
        else []
        for i, t in enumerate((*operands, *results))
    ]
    return text(terms[: len(operands)], terms[len(operands) :])


def _factored(saves: tuple[int, ...], saves_results: tuple[int, ...]) -> RuleMaker:
    """Factors of matrices, or what is made of those again."""

    def make(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
        del op
        each = _of_matrices(operands, results)
        whole = whole_rule(operands, results)
        return replace(
            whole if each is None else Rule(each),
            saves=saves,
            saves_results=saves_results,
            flops=float(operands[0].shape[-1]),
            backward=2.0,
            cost="reduction",
        )

    return make


def _decomposed(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Matrices [..., m, n], each for itself, to what they are made of."""
    lead = letters(len(operands[0].shape) - 2)
    right = [
        [*lead, *(f"r{i}_{d}!" for d in range(len(t.shape) - len(lead)))]
        for i, t in enumerate(results)
    ]
    determinant = op.kind.endswith("det")
    return Rule(
        text([[*lead, "m!", "n!"]], right),
        saves=(0,) if determinant else (),
        saves_results=tuple(i for i in range(len(results)) if not (i == 1 and len(results) == 4)),
        flop_terms=((10.0 * operands[0].shape[-1], ("m", "n", *lead)),),
        backward=2.0,
        cost="reduction",
    )


def _diagonal_scatter(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """diagonal_scatter(x, source, offset, dim1, dim2): the source is a diagonal, which comes last
    there; of it and of x nothing is kept."""
    del results
    rank = len(operands[0].shape)
    dims = [positive(int(argument(op, 3 + i, f"dim{1 + i}", i)), rank) for i in range(2)]
    names = letters(rank)
    whole = [f"{n}!" if i in dims else n for i, n in enumerate(names)]
    source = [*(n for i, n in enumerate(names) if i not in dims), "diagonal!"]
    return Rule(text([whole, source], [whole]), flops=0.0)


def _in_order(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """masked_scatter(x, mask, source): which number of the source an element gets hangs on how many
    before it were chosen."""
    del op
    return replace(whole_rule(operands, results), saves=(1,))


TORCH_CALLS: Mapping[str, Rule | RuleMaker] = {
    **{f"aten::{name}": _pointwise("") for name in "round ceil trunc isfinite".split()},
    **dict.fromkeys(("aten::exp2", "aten::expm1", "aten::tan"), _pointwise("y")),
    **{
        f"aten::{name}": _pointwise("0")
        for name in "log_sigmoid hardswish hardsigmoid selu celu log2 log10 atan".split()
    },
    **{
        f"aten::{name}": _pointwise("012")
        for name in (
            "logaddexp smooth_l1_loss huber_loss binary_cross_entropy "
            "binary_cross_entropy_with_logits"
        ).split()
    },
    "aten::kl_div": _divergence,
    "aten::argsort": _along(1),
    "aten::baddbmm": _baddbmm,
    # How distances are computed depends on the numbers of points.
    "aten::cdist": Rule(
        "... p! m!, ... r! m! -> ... p! r!",
        saves=(0, 1),
        saves_results=(0,),
        flops=3.0,
        backward=2.0,
        cost="reduction",
    ),
    **{f"aten::adaptive_max_pool{n}d": most_of_windows for n in (2, 3)},
    **{f"aten::max_pool{n}d_with_indices": most_of_windows for n in (2, 3)},
    **{f"aten::fractional_max_pool{n}d": most_of_windows for n in (2, 3)},
    "aten::bucketize": _placed,
    "aten::cosine_similarity": _cosine,
    "aten::cummax": _along(1, (1,), (0,)),
    "aten::cummin": _along(1, (1,), (0,)),
    "aten::cumprod": _along(1, (0,), (0,)),
    "aten::diagonal": _diagonal,
    "aten::diff": _along(2),
    "aten::glu": _along(1, saves=(0,)),
    "aten::histc": _histogram,
    "aten::index_add": add_at,
    "aten::index_put": index_put,
    "aten::index_reduce": reduce_at,
    "aten::lerp": _lerp,
    "aten::linalg_vector_norm": _over(2, (0,), (0,)),
    "aten::prod": _over(1, (0,), (0,)),
    "aten::median": _over(1, (), (1,)),
    "aten::nanmedian": _over(1, (), (1,)),
    "aten::mode": _over(1, (), (1,), -1),
    "aten::std_mean": _over(1, (0,), (0,)),
    "aten::aminmax": _over(1, (0,), (0, 1)),
    "aten::logcumsumexp": _along(1, (0,), (0,)),
    "aten::_pdist_forward": Rule("n! m! -> pairs!", saves=(0,), saves_results=(0,), flops=3.0),
    "aten::prelu": _prelu,
    "aten::diagonal_scatter": _diagonal_scatter,
    "aten::masked_scatter": _in_order,
    "aten::scatter_add": scatter_add,
    "aten::scatter_reduce": scatter_reduce,
    "aten::grid_sampler_2d": Rule(
        "n c h! w!, n p q t! -> n c p q", saves=(0, 1), flops=10.0, cost="gather"
    ),
    "aten::grid_sampler_3d": Rule(
        "n c d! h! w!, n o p q t! -> n c o p q", saves=(0, 1), flops=20.0, cost="gather"
    ),
    "aten::searchsorted": _placed,
    "aten::slice_scatter": _along(2),
    "aten::sort": _along(1, (1,)),
    "aten::topk": _along(2, (1,)),
    "aten::unfold": windows_of_dim,
    "aten::view_as_real": Rule("... -> ... c!", flops=0.0, view=True),
    # Rows x [s, k] stand in order of their expert; offsets [e] say where each one's rows end.
    "transformers::grouped_mm_fallback": Rule(
        "s! k+, e! k+ n, e! -> s! n",
        saves=(0, 1),
        flop_terms=((2.0, ("s", "k", "n")),),
        cost="matmul",
    ),
    **dict.fromkeys(
        ("aten::linalg_matrix_exp", "aten::linalg_inv_ex", "aten::linalg_cholesky_ex"), _matrices
    ),
    **dict.fromkeys(("aten::_linalg_solve_ex", "aten::linalg_solve_triangular"), _solved),
    **{
        f"aten::{name}": _decomposed
        for name in "_linalg_det _linalg_slogdet _linalg_eigh _linalg_svd linalg_qr".split()
    },
    "aten::linalg_lu": _factored((), (0, 1, 2)),
    "aten::linalg_lu_factor_ex": _factored((), (0, 1)),
    "aten::linalg_lu_solve": _factored((0, 1), (0,)),
    "aten::lu_unpack": _factored((), ()),
    "aten::linalg_householder_product": _factored((0, 1), (0,)),
    "aten::linalg_pinv": _factored((0,), (0,)),
    **{f"aten::conv_transpose{n}d": conv_transpose for n in (1, 2, 3)},
    **{
        f"aten::upsample_{name}": resized
        for name in (
            "nearest1d nearest2d nearest3d linear1d bilinear2d trilinear3d bicubic2d"
        ).split()
    },
    **{f"aten::_upsample_{name}_aa": resized for name in ("bilinear2d", "bicubic2d")},
    **{f"aten::avg_pool{n}d": pooled for n in (1, 2, 3)},
    **dict.fromkeys(("aten::pixel_shuffle", "aten::pixel_unshuffle", "aten::im2col"), first_dim),
    **dict.fromkeys(("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"), recurrent),
    **{f"aten::{name}_cell": cell for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
