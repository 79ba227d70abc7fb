"""From a lowered graph and its plan to the text of a PyTorch program."""

from autopar.runtime.emit_torch.emit import EmitError, emit

__all__ = ["EmitError", "emit"]
