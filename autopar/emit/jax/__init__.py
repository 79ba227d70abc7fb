"""The JAX backend: from a lowered plan to a program, ``model.py`` and ``train.py``."""

from autopar.emit.jax.emit import FILE, emit
from autopar.emit.jax.errors import JaxEmitError, UnevenPieces

__all__ = ["FILE", "JaxEmitError", "UnevenPieces", "emit"]
