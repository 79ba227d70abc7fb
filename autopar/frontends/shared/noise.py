"""What stands in for random numbers where a plan is compared with its model."""

from __future__ import annotations

HAPPENS_ABOVE = (0.5, 0.05)
"""What is likelier than the first of these happens, or than the next where a model is left without
a loss; see `stand_in`."""


def stand_in(
    distribution: str, *given: float, whole: bool = False, above: float = HAPPENS_ABOVE[0]
) -> float:
    """One number for every draw of a `noise` op, the same however the tensor is split.

    A uniform number is what ``above`` says: the middle, at which stochastic depth keeps everything,
    and what is likelier than that happens. Normal noise is one deviation above its mean: at the
    mean itself nothing would flow back to the deviation, which a model may have computed. A
    bernoulli is the root mean square of its draws, ``sqrt(p)``: at one its share would not show, at
    ``p`` the ``1 / p`` that goes with it. ``whole``: of a dtype without fractions it is whether a
    uniform number would be below its share. ``above`` is low where nothing is left to learn from
    else: a loss over the words that were masked, of which there are none.
    """
    match distribution:
        case "uniform":
            return given[0] + (given[1] - given[0]) * above
        case "normal":
            return sum(given)
        case "bernoulli":
            return float(given[0] > above) if whole else float(given[0]) ** 0.5
        case "exponential":
            return 1 / given[0]
        case "integers":
            return (given[0] + given[1] - 1) // 2
    raise ValueError(f"no distribution {distribution!r}")


def dropout_factor(p: float, features: bool = False, alpha: bool = False) -> float:
    """What stands in for dropping a share ``p``: one number that everything is multiplied with.

    The root mean square of what dropout multiplies with, 0 or ``1 / (1 - p)``: neither one, so that
    a dropout which is left out shows, nor the scale of what is kept, nor its own square. Where
    whole ``features`` are dropped, the third power's mean stands there, to tell one from the other,
    and of alpha dropout, which shifts what it keeps, the root of either.
    """
    if not 0 < p < 1:
        return 1.0 if not p else 0.0
    kept = 1 - float(p)
    power = -2 / 3 if features else -1 / 2
    return float(kept ** (power / 2 if alpha else power))
