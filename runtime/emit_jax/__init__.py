"""The JAX backend: from a lowered plan to ``program/train.py``."""

from autopar.runtime.emit_jax.emit import FILE, emit
from autopar.runtime.emit_jax.errors import JaxEmitError, UnevenPieces

__all__ = ["FILE", "JaxEmitError", "UnevenPieces", "emit"]
