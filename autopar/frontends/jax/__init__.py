"""The JAX frontend: a pure loss function of parameters and a batch, to a `Graph`."""

from autopar.frontends.captured import Captured, ModelTensor
from autopar.frontends.jax.capture import capture, capture_workload
from autopar.frontends.jax.errors import (
    BatchError,
    BuildError,
    CaptureError,
    ControlFlow,
    LargeConstant,
    LossError,
    NotFloating,
    NotScalarLoss,
    ParameterWithoutGradient,
)
from autopar.frontends.jax.inputs import paths_of

__all__ = [
    "BatchError",
    "BuildError",
    "CaptureError",
    "Captured",
    "ControlFlow",
    "LargeConstant",
    "LossError",
    "ModelTensor",
    "NotFloating",
    "NotScalarLoss",
    "ParameterWithoutGradient",
    "capture",
    "capture_workload",
    "paths_of",
]
