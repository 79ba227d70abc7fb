"""Spellings in PyTorch, a file a theme."""
