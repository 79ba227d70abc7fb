"""Readable programs from a lowered plan: text, and no framework."""
