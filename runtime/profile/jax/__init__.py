"""What `autopar profile --framework jax` measures."""
