"""PyTorch plans against the original model, on the plan's own ranks."""
