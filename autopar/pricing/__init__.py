"""Time and memory of a lowered plan."""
