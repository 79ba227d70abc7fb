"""The JAX frontend: a pure loss function of parameters and a batch, to a `Graph`."""

from autopar.frontends.jax.capture import Captured, capture, paths_of
from autopar.frontends.jax.errors import (
    CaptureError,
    ControlFlow,
    LargeConstant,
    NotScalarLoss,
    ParameterWithoutGradient,
)

__all__ = [
    "CaptureError",
    "Captured",
    "ControlFlow",
    "LargeConstant",
    "NotScalarLoss",
    "ParameterWithoutGradient",
    "capture",
    "paths_of",
]
