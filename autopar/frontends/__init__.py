"""Frontends: from a user's model to a `Graph`. Importing this package imports no framework."""
