"""JAX plans against the user's own loss function."""
