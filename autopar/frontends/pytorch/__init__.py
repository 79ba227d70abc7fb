"""The PyTorch frontend: any `nn.Module` whose forward returns the loss, to a `Graph`."""

from autopar.frontends.captured import Captured, ModelTensor
from autopar.frontends.pytorch.capture import capture, capture_built
from autopar.frontends.pytorch.errors import CaptureError

__all__ = [
    "CaptureError",
    "Captured",
    "ModelTensor",
    "capture",
    "capture_built",
]
