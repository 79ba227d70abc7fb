"""What a plan can ask for that the JAX backend does not do."""

from __future__ import annotations

from autopar.nouns.errors import UserError


class JaxEmitError(UserError):
    """A plan that cannot be written as a JAX program."""


class UnevenPieces(JaxEmitError):
    """A dim that its axes do not divide: JAX cuts arrays evenly."""
