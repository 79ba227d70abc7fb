"""What emitted JAX programs import, and the trainer of their plans."""
