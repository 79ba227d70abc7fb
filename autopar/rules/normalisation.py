"""Normalisations: the dims that share statistics stay whole, or split with collectives inside."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.nouns.graph import Op, Tensor
from autopar.rules.implementations.table import LOCAL_GROUPS, SYNCHRONISED
from autopar.rules.kept import Kept
from autopar.rules.notation import Implemented, Internal, Rule, RuleMaker
from autopar.rules.terms import accumulated, letters, positive, text

# Nominal operations per element: statistics, normalising, scale and shift.
NORM_FLOPS = 8.0
SOFTMAX_FLOPS = 5.0 + 3.0  # maximum, subtract, sum, divide, and an exponential
MEAN_AND_DEVIATION = 8  # bytes: one fp32 each


def _layer_norm(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    trailing = [f"{n}!" for n in letters(int(op.attrs.get("dims", 1)), "p")]
    return Rule(
        text([["...", *trailing], *[trailing] * (len(operands) - 1)], [["...", *trailing]]),
        saves=tuple(range(len(operands))),
        keeps=(Kept(("...",), MEAN_AND_DEVIATION),),
        flops=NORM_FLOPS,
        backward=2.0,
        cost="reduction",
    )


def _rms_norm(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """As the fused kernel does it: its input and one reciprocal deviation a row are kept."""
    del op, results
    return Rule(
        text([["...", "c!"], *[["c!"]] * (len(operands) - 1)], [["...", "c!"]]),
        saves=tuple(range(len(operands))),
        keeps=(Kept(("...",), 4),),
        flops=NORM_FLOPS,
        backward=2.0,
        cost="reduction",
    )


def _group_norm(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    channels = f"(g={op.attrs['groups']} c!)"
    image = ["b", channels, *[f"{n}!" for n in letters(len(operands[0].shape) - 2, "p")]]
    return Rule(
        text([image, *[[channels]] * (len(operands) - 1)], [image]),
        saves=tuple(range(min(len(operands), 2))),
        keeps=(Kept(("b", "g"), MEAN_AND_DEVIATION),),
        implementations=(Implemented("g", LOCAL_GROUPS),),
        flops=NORM_FLOPS,
        backward=2.0,
        cost="reduction",
    )


def _batch_norm(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    """Statistics over all but the channels: splitting those dims moves 2c numbers each way.

    Forward the local sums, then the squares around their mean; backward, at once, the sums of the
    gradient and of its product with the normalised input. With stored statistics
    (``training: false``) nothing moves.
    """
    del results
    spatial = letters(len(operands[0].shape) - 2, "p")
    image = ["b", "c", *spatial]
    training = bool(op.attrs.get("training", True))
    affine = bool(op.attrs.get("affine", len(operands) in (3, 5)))
    over = ["b", *spatial] if training else []
    dtype = accumulated(operands[0])
    moves = (
        Internal("all_reduce", "forward", ("c",), 1, dtype),
        Internal("all_reduce", "forward", ("c",), 1, dtype),
        Internal("all_reduce", "backward", ("c",), 2, dtype, needed_by=0),
    )
    return Rule(
        text([image, *[["c"]] * (len(operands) - 1)], [image]),
        saves=tuple(i for i in range(len(operands)) if not (affine and i == 2)),
        keeps=(Kept(("c",), MEAN_AND_DEVIATION),) if training else (),
        implementations=tuple(Implemented(factor, SYNCHRONISED, moves) for factor in over),
        flops=NORM_FLOPS,
        backward=2.0,
        cost="reduction",
    )


def _softmax(op: Op, operands: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Rule:
    del results
    rank = len(operands[0].shape)
    dim = positive(int(op.attrs.get("dim", -1)), rank)
    term = [f"{n}!" if i == dim else n for i, n in enumerate(letters(rank))]
    return Rule(text([term], [term]), saves_results=(0,), flops=SOFTMAX_FLOPS, cost="reduction")


NORMALISATION: Mapping[str, Rule | RuleMaker] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "softmax": _softmax,
    "log_softmax": _softmax,
}
