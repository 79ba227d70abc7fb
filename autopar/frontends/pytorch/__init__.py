"""The PyTorch frontend: any `nn.Module` whose forward returns the loss, to a `Graph`."""

from autopar.frontends.pytorch.capture import capture
from autopar.frontends.shared.captured import Captured

__all__ = ["Captured", "capture"]
