"""What stands in for random numbers where a plan is compared with its model."""

from __future__ import annotations


def stand_in(distribution: str, *given: float) -> float:
    """One number for every draw of a `noise` op, the same however the tensor is split.

    Stochastic depth keeps everything (a uniform number is the middle, a bernoulli the likelier
    side), and normal noise is one deviation above its mean: at the mean itself nothing would flow
    back to the deviation, which a model may have computed.
    """
    match distribution:
        case "uniform":
            return sum(given) / 2
        case "normal":
            return sum(given)
        case "bernoulli":
            return float(given[0] > 0.5)
        case "exponential":
            return 1 / given[0]
        case "integers":
            return (given[0] + given[1] - 1) // 2
    raise ValueError(f"no distribution {distribution!r}")
