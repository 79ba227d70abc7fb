"""What verifying a plan found, and what an error is relative to. Needs no torch, so that the
command line can read it.

A step is judged in two parts, each on equal inputs.

*Gradients* are the program's own, each relative to its own norm. Where that norm is under a
millionth of the whole gradient's, it is either small or zero in theory: the bias of a key that
softmax takes out again, or one in front of a normalisation, has a gradient whose terms cancel, and
what is left is rounding, 1e-17 against 1e-17. Which of the two it is, the reference measures: it
runs again with every weight and number of the batch moved by one unit in its last place. A small
gradient stays as it is, and is judged relative to its own norm, so that one which is missing or
wrong shows, however small it is. One that is rounding changes as much as it is large; it is judged
relative to that rounding.

*The optimizer* is given the reference's gradients, cut to each rank's pieces, in place of the
program's: AdamW divides a gradient by its own size, and would make steps out of rounding that
cannot agree. On equal gradients every weight must move alike, those without a gradient in theory
too, so weights are judged relative to how far they moved. A wrong rate, decay, clip or correction,
a step that a rank does not take, or takes on the wrong piece, moves them otherwise. So the two
steps of program and reference start from equal weights, and the second one's gradients are judged
on these. What was taken away from the program, its own gradients, has been judged already.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from autopar.lowering.precision import at_precision
from autopar.nouns.graph import Graph
from autopar.runtime.verify.narrow import NarrowResult

TOLERANCE = 1e-9
NEGLIGIBLE = 1e-6
"""A gradient below this share of the whole gradient's norm is rounding around zero, in float64."""
ROUNDING = 1e-3
"""The share of the whole gradient's norm that such a gradient is measured against: what is left of
sums that cancel is some hundred times the machine epsilon of what was summed. Only where it cannot
be measured, or where that allows less than the measurement."""
MARGIN = 1e3
"""How much larger the rounding of another order of sums may be than what was measured of it."""
STORED = 8
"""Roundings of a weight in two steps: product with the decay, and sum, on either side."""
SMALLEST = 1e-300
"""Nothing is relative to zero."""

_EPSILON = {"float64": 2**-52, "float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10,
            "float8_e4m3fn": 2**-3}  # fmt: skip
"""Relative distance from 1 to the next number, by dtype."""


def rounding_of(precision: str) -> float:
    """The root of a precision's machine epsilon: errors beyond are not what rounding does to a
    model that is well behaved."""
    return math.sqrt(_EPSILON[precision])


def narrowest(graph: Graph, precision: str) -> str:
    """The narrowest float that a plan of ``precision`` has of the captured ``graph``, where
    gradients go: what it computes in, where the model casts by itself, what holds parameters."""
    run = at_precision(graph, precision)
    parts = (run, *(block.body for block in run.blocks.values()))
    tensors = [t for part in parts for t in part.tensors.values() if t.differentiable]
    dtypes = {t.dtype for t in tensors if t.dtype in _EPSILON}
    return max(sorted(dtypes) or [precision], key=_EPSILON.__getitem__)


def gradient_scale(norm: float, whole: float, share: float, noise: float = 0.0) -> float:
    """What the error of a gradient of this norm is relative to.

    whole: the norm of the whole gradient.
    share: `NEGLIGIBLE`, or what stands for it in the plan's own precision.
    noise: norm of what rounding changes of this gradient; 0 where that was not measured.
    """
    if norm >= share * whole:
        return max(norm, SMALLEST)
    coarse = max(share, ROUNDING) * whole
    fine = max(norm, MARGIN * noise / TOLERANCE) if noise else coarse
    return max(min(fine, coarse), SMALLEST)


def weight_scale(norm: float, moved: float, precision: str, tolerance: float) -> float:
    """What the error of a weight of this norm is relative to: how far the steps ``moved`` it.

    Not less than lets ``tolerance`` of it be what storing a weight in ``precision`` rounds off.
    """
    return max(moved, STORED * _EPSILON[precision] / tolerance * norm, SMALLEST)


@dataclass(frozen=True, slots=True)
class Errors:
    """Largest errors of a run against the reference: of a gradient relative to its own norm, of a
    weight to how far it moved on equal gradients; see this module and `gradient_scale`.

    A buffer under a millionth of the norm of all weights, such as the running mean behind a bias
    that has no effect, is measured against that norm. In a plan's own precision the root of its
    machine epsilon stands for the millionth.

    ``output``: of what a loss function returns beside the loss, in float64 alone, since the largest
    of some numbers may be another one where they are rounded; None where it returns nothing.

    ``evaluation``: of the loss that the program evaluates to after the steps, in float64 alone;
    infinite where it changes a buffer, which ``worst_evaluation`` names; None where the model has
    no such loss.
    """

    loss: float
    gradient: float
    weight: float
    worst_gradient: str
    worst_weight: str
    output: float | None = None
    worst_output: str = ""
    evaluation: float | None = None
    worst_evaluation: str = ""

    @property
    def largest(self) -> float:
        return max(
            self.loss, self.gradient, self.weight, self.output or 0.0, self.evaluation or 0.0
        )


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """A plan against its model: two optimizer steps in float64 from one seed, dropout and
    random numbers fixed.

    own:                    the same as the program is, against the float64 reference.
    precision:              the narrowest float that it has then, see `narrowest`.
    computes_in:            the plan's precision.
    collectives_match:      whether a step issues the bytes that were priced, by kind and axis;
                            None where the folder has no ``collectives.json``.
    collective_differences: one line for each kind and axis that differs.
    issued:                 the collectives of one step, as rows of ``collectives.json``.
    first_difference:       where `exact` is beyond `TOLERANCE`: the first result that differs.
    recompute_differences:  where a step's blocks recompute otherwise than planned, a line each.
    unchecked:              what the comparison cannot see, one sentence each.
    merged:                 pairs of parameters of one gradient, which XLA adds up once: less moves
                            than was priced, by just that.
    joined:                 collectives that XLA need not run, of equal ones all but one and gathers
                            of one number: less moves than was priced, by just that.
    narrow:                 what was seen of layers in 8 bits, where there are any.
    """

    plan: str
    ranks: int
    exact: Errors
    own: Errors
    precision: str
    collectives_match: bool | None
    collective_differences: tuple[str, ...]
    issued: tuple[dict[str, Any], ...]
    time_s: float
    first_difference: str = ""
    unchecked: tuple[str, ...] = ()
    recompute_differences: tuple[str, ...] = ()
    computes_in: str = "float32"
    merged: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    narrow: NarrowResult | None = None

    @property
    def passed(self) -> bool:
        """Within `TOLERANCE`, 8-bit layers too, and what moves and what runs again is what was
        priced."""
        as_priced = self.collectives_match is not False and not self.recompute_differences
        narrow = self.narrow is None or self.narrow.passed(TOLERANCE)
        return self.exact.largest <= TOLERANCE and as_priced and narrow

    @property
    def own_is(self) -> str:
        """In which precision the program as it is ran, where its narrowest float does not say it
        all; else empty."""
        if self.narrow is not None:
            return f"computes in {self.computes_in}, with layers in 8 bits"
        if self.precision == "float64":
            return "in float64 too"
        if _EPSILON[self.computes_in] < _EPSILON[self.precision]:
            return (
                f"computes in {self.computes_in}, with {self.precision} in parameters or in "
                "casts of the model's own"
            )
        return ""

    @property
    def own_within_rounding(self) -> bool:
        """Whether the errors in the program's own precision are within `rounding_of` it. It is no
        failure where they are not: a model may well magnify rounding, on one device too."""
        return self.own.largest <= self.rounding

    @property
    def rounding(self) -> float:
        """`rounding_of` the narrowest precision, 8 bits where layers have them."""
        return rounding_of(self.precision if self.narrow is None else "float8_e4m3fn")

    def to_json(self) -> dict[str, Any]:
        """What ``autopar verify --json`` prints."""
        return {
            "plan": self.plan,
            "passed": self.passed,
            "loss_rel_err": self.exact.loss,
            "max_grad_rel_err": self.exact.gradient,
            "max_weight_rel_err": self.exact.weight,
            "worst_grad": self.exact.worst_gradient,
            "worst_weight": self.exact.worst_weight,
            "max_output_rel_err": self.exact.output,
            "worst_output": self.exact.worst_output,
            "evaluation_rel_err": self.exact.evaluation,
            "worst_evaluation": self.exact.worst_evaluation,
            "tolerance": TOLERANCE,
            "collectives_match": self.collectives_match,
            "collective_differences": list(self.collective_differences),
            "collectives": list(self.issued),
            "merged": list(self.merged),
            "joined": list(self.joined),
            "ranks": self.ranks,
            "dropout": "fixed",
            "random_numbers": "fixed",
            "own_precision": {
                "precision": self.precision,
                "computes_in": self.computes_in,
                **asdict(self.own),
                "rounding": self.rounding,
                "within_rounding": self.own_within_rounding,
            },
            "first_difference": self.first_difference,
            "recompute_differences": list(self.recompute_differences),
            "unchecked": list(self.unchecked),
            "narrow": None if self.narrow is None else asdict(self.narrow),
            "time_s": self.time_s,
        }

    @staticmethod
    def read(data: dict[str, Any]) -> VerifyResult:
        """From `dataclasses.asdict` of one, after JSON."""
        return VerifyResult(
            **{
                **data,
                "exact": Errors(**data["exact"]),
                "own": Errors(**data["own"]),
                "collective_differences": tuple(data["collective_differences"]),
                "issued": tuple(data["issued"]),
                "unchecked": tuple(data["unchecked"]),
                "recompute_differences": tuple(data["recompute_differences"]),
                "merged": tuple(data["merged"]),
                "joined": tuple(data["joined"]),
                "narrow": NarrowResult.read(data["narrow"]),
            }
        )
