"""The JAX frontend: a pure loss function of parameters and a batch, to a `Graph`."""

from autopar.frontends.captured import Captured, ModelTensor
from autopar.frontends.jax.capture import capture, capture_workload, paths_of
from autopar.frontends.jax.errors import (
    BatchError,
    CaptureError,
    ControlFlow,
    LargeConstant,
    NotScalarLoss,
    ParameterWithoutGradient,
)

__all__ = [
    "BatchError",
    "CaptureError",
    "Captured",
    "ControlFlow",
    "LargeConstant",
    "ModelTensor",
    "NotScalarLoss",
    "ParameterWithoutGradient",
    "capture",
    "capture_workload",
    "paths_of",
]
