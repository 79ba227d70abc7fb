"""The PyTorch frontend: any `nn.Module` whose forward returns the loss, to a `Graph`."""

from autopar.frontends.captured import Captured
from autopar.frontends.pytorch.capture import capture

__all__ = ["Captured", "capture"]
