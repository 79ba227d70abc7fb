"""The rule of a feed-forward part in chunks of tokens (`autopar.rules.feed_forwards`).

Kept is what goes in. Backward makes what stands between the products once more, chunk by chunk, and
adds to the gradients of the matrices as often. An axis may split tokens, or the width between the
products: the result is then a sum over it.

Where a pipeline takes backward in two parts, each makes it once more.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.graph import DTYPE_BYTES, Op, Tensor
from autopar.rules.gates import kept_of_gate
from autopar.rules.kept import Chunked, Kept, Streamed
from autopar.rules.notation import Rule, RuleMaker
from autopar.rules.terms import accumulated, text

LEAST_TOKENS = 1024
"""Of a chunk, below which products reach much less."""


def _feed_forward(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """``chunks`` of 0 are as many as it takes, of `LEAST_TOKENS` at least, and take no longer than
    one: what bounds every number of them."""
    del results
    x, matrices, biases = operands[0], operands[1 : op.attrs["ups"] + 2], op.attrs["biases"]
    ups, steps = int(op.attrs["ups"]), op.attrs["gate"]
    chunks = int(op.attrs["chunks"])
    most = 0 if chunks else LEAST_TOKENS
    several = chunks != 1
    chunks = chunks or 1
    outer = [f"b{i}" for i in range(len(x.shape) - 2)]
    tokens = (*outer, "s")
    wide, up, down = (*tokens, "f"), ["f~+", "k!"], ["o!", "f~+"]
    if op.attrs["transposed"]:
        up, down = up[::-1], down[::-1]
    terms = [[*tokens, "k!"], *[up] * ups, down, *[["f~+"]] * len(biases)]
    own, sums = DTYPE_BYTES[x.dtype], DTYPE_BYTES[accumulated(x)]
    sizes = [(("f", "k"), matrix) for matrix in matrices[:-1]] + [(("o", "f"), matrices[-1])]
    trained = [dims for dims, matrix in sizes if matrix.differentiable]
    added = 2 * sums if own == sums else 2 * own + 2 * sums
    # what each step reads and writes, in backward made again, and its gradients
    forward = own * sum(len(given) + 1 for _, given, _ in steps)
    backward = forward + own * sum(2 * len(given) + 1 for _, given, _ in steps)
    kept = kept_of_gate(steps, ups, x)
    first = (2.0 * ups, (*tokens, "k", "f"))
    return Rule(
        text(terms, [[*tokens, "o!"]]),
        saves=tuple(range(len(operands))),
        workspace=(Kept(wide, own * (ups + len(steps))),),
        workspace_back=(
            Kept(wide, own * (len(kept) + 3)),  # gradients: of the last step, and two before it
            *(Kept(dims, sums) for dims in trained if own < sums and several),
            *(Kept(("f", "k"), own) for m in matrices[:-1] if m.differentiable and several),
        ),
        streams=(Streamed(wide, forward),),
        streams_back=(
            Streamed(wide, backward),
            *(Streamed(dims, (chunks - 1) * added) for dims in trained if chunks > 1),
        ),
        chunked=Chunked("s", chunks, ups + 1, most),
        flop_terms=(first, (2.0, (*tokens, "f", "o"))),
        again=(first,),
        backward=_backward(operands, matrices),
        sides=((tokens, ()), (("f",), ()), (("k",), ())),
        cost="matmul",
    )


def _backward(operands: tuple[Tensor, ...], matrices: tuple[Tensor, ...]) -> float:
    """Products of the backward over those of the forward, each as large as its matrix."""
    *ups, down = matrices
    first = any(one.differentiable for one in (operands[0], *ups, *operands[len(matrices) + 1 :]))
    products = down.numel * (down.differentiable + first)
    products += sum(up.numel * (up.differentiable + operands[0].differentiable) for up in ups)
    return products / sum(one.numel for one in matrices)


FEED_FORWARD: Mapping[str, Rule | RuleMaker] = {"feed_forward": _feed_forward}
