"""How far steps of a program are from those of the reference."""

from __future__ import annotations

import math

import numpy as np

from autopar.runtime.verify.jax.record import Named, Record
from autopar.runtime.verify.verified import (
    MARGIN,
    NEGLIGIBLE,
    SMALLEST,
    TOLERANCE,
    Errors,
    gradient_scale,
    rounding_of,
    weight_scale,
)


def errors(
    actual: Record, right: Record, precision: str = "float64", tolerance: float = TOLERANCE
) -> Errors:
    """Largest errors of a run in ``precision``, whose errors are held against ``tolerance``."""
    exact = precision == "float64"
    share = NEGLIGIBLE if exact else rounding_of(precision)
    loss = max(
        abs(a - b) / max(abs(b), SMALLEST) if math.isfinite(a) else math.inf
        for a, b in zip(actual.losses, right.losses, strict=True)
    )
    worst, worst_weight = (0.0, ""), (0.0, "")
    for ours, theirs, noise in zip(actual.gradients, right.gradients, right.noise, strict=True):
        whole = norm_of_all(theirs)
        for name, g in theirs.items():
            measured = noise.get(name, 0.0) if exact else 0.0
            scale = gradient_scale(float(np.linalg.norm(g)), whole, share, measured)
            worst = max(worst, (_distance(ours[name], g) / scale, name))
    for name, w in right.weights.items():
        scale = weight_scale(float(np.linalg.norm(w)), right.moved[name], precision, tolerance)
        worst_weight = max(worst_weight, (_distance(actual.weights[name], w) / scale, name))
    beside = _output_errors(actual, right) if exact else {}
    output = max(beside, key=lambda name: beside[name], default="")
    return Errors(
        *(loss, worst[0], worst_weight[0], worst[1], worst_weight[1]),
        output=beside.get(output),
        worst_output=output,
    )


def _output_errors(actual: Record, right: Record) -> dict[str, float]:
    """Of what is returned beside the loss, in float64, each relative to its own norm; where that is
    what rounding leaves of sums that cancel, to what was measured of it."""
    made: dict[str, float] = {}
    steps = zip(actual.outputs, right.outputs, right.output_noise, strict=True)
    for ours, theirs, noise in steps if actual.outputs else ():
        for name, array in theirs.items():
            # where rounding makes other numbers infinite, nothing is left to be judged by it
            rounding = noise[name] if math.isfinite(noise[name]) else 0.0
            scale = max(_size(array), MARGIN * rounding / TOLERANCE, SMALLEST)
            made[name] = max(made.get(name, 0.0), apart(ours[name], array) / scale)
    return made


def apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """How far two arrays are from each other: infinitely where they have other shapes, or are not
    the same where they are no finite numbers."""
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = (a.astype(np.result_type(a.dtype, np.float64)) for a in (ours, theirs))
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return math.inf
    return _distance(ours[finite], theirs[finite])


def _size(array: np.ndarray) -> float:
    finite = array[np.isfinite(array)]
    return float(np.linalg.norm(finite.astype(np.result_type(array.dtype, np.float64))))


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    wide = np.result_type(ours.dtype, np.float64)
    distance = float(np.linalg.norm(np.ravel(ours.astype(wide) - theirs)))
    return distance if math.isfinite(distance) else math.inf


def norm_of_all(named: Named) -> float:
    return math.sqrt(sum(float(np.square(a.astype(np.float64)).sum()) for a in named.values()))
