"""What can be wrong with a JAX model; each text says what was asked and what to try next."""

from __future__ import annotations

from autopar.nouns.errors import UserError


class CaptureError(UserError):
    """A JAX loss function that cannot be captured."""


class NoFloat64(CaptureError):
    """A workload in float64 where jax computes in 32 bits."""


class BuildError(CaptureError):
    """The callable that makes the parameters or the batch failed."""


class LossError(CaptureError):
    """The loss function raised an error of its own."""


class NotFloating(CaptureError):
    """A leaf of the parameters that is no floating-point array, so has no gradient."""


class NotScalarLoss(CaptureError):
    """The function returns something that is not one floating-point number."""


class ControlFlow(CaptureError):
    """``while_loop``, ``cond`` or a Python branch on traced values."""


class ParameterWithoutGradient(CaptureError):
    """The loss gives no parameter a gradient."""


class ComplexNumbers(CaptureError):
    """The loss computes with complex numbers, for which the JAX frontend has no ops."""


class LargeConstant(CaptureError):
    """A closed-over array that is too large to be written into the program."""


class BatchError(CaptureError):
    """The batch is not a dict of arrays with one common batch dim."""


class RuleFailed(CaptureError):
    """The rule of a ``custom_vjp`` or ``custom_jvp`` raised an error, or does not fit its call."""


class RandomKeys(CaptureError):
    """A random key that follows from data, or a use of random keys that no program can have."""
