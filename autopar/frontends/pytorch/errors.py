"""What a PyTorch model can do that keeps it from being captured, each with its own name."""

from __future__ import annotations

from autopar.nouns.errors import UserError


class CaptureError(UserError):
    """The model cannot be captured; the text says why and what to change."""


class BuildError(CaptureError):
    """The model's or the batch's callable failed, or made something else."""


class BatchError(CaptureError):
    """The batch is not a dict of tensors that share their dim 0."""


class ForwardError(CaptureError):
    """The forward raised an error of its own."""


class DataDependentError(CaptureError):
    """The forward decides in Python by a value that only real data has."""


class HostDrawError(CaptureError):
    """The forward draws random numbers that are not torch's."""


class LossError(CaptureError):
    """The forward does not return one scalar that gradients flow from."""


class MutationError(CaptureError):
    """The forward writes into a tensor in a way that has no functional form here."""


class UnsupportedOpError(CaptureError):
    """A higher-order op (a loop, a branch, a map) stands in the forward."""
