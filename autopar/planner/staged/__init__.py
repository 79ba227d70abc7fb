"""The search over pipelines."""
