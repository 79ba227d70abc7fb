"""What `autopar profile` measures."""
