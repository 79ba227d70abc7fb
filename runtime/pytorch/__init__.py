"""What emitted PyTorch programs import, and the trainer of their plans."""
