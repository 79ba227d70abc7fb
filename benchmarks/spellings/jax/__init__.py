"""Spellings in JAX, a file a theme."""
