"""The `autopar` command."""
