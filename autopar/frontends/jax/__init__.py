"""The JAX frontend: a pure loss function of parameters and a batch, to a `Graph`."""

from autopar.frontends.jax.capture import capture, capture_workload
from autopar.frontends.jax.inputs import is_key, paths_of
from autopar.frontends.shared.captured import Captured

__all__ = ["Captured", "capture", "capture_workload", "is_key", "paths_of"]
