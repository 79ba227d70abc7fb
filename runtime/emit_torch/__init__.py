"""From a lowered graph and its plan to the text of a PyTorch program."""

from autopar.runtime.emit_torch.emit import emit
from autopar.runtime.emit_torch.site import EmitError

__all__ = ["EmitError", "emit"]
