"""What may be split: one rule per op kind, and everything that follows from it."""
