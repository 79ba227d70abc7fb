"""Algorithms of collectives as sends: proven, priced, synthesised for irregular links."""
