"""Architectures of the transformer family priced from their figures."""
