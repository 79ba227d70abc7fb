"""Transformers by a few figures: their files, their graphs, and the figures of captured models."""
