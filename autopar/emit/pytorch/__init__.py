"""From a lowered graph and its plan to the text of a PyTorch program."""

from autopar.emit.pytorch.emit import emit
from autopar.emit.pytorch.site import EmitError

__all__ = ["EmitError", "emit"]
