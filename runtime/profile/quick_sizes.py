"""How much `autopar plan` measures by itself: a few seconds."""

ENOUGH_S = 0.02
FEWEST = 3
CHAIN_BYTES = 4e6
"""What a chain touches: the results of a small model stay in the caches that a core has."""
SIZES = (1 << 15, 1 << 21)
"""Of collectives, in bytes."""
UPDATES = (1 << 18, 1 << 21)
"""Of optimizers, in elements."""
LARGEST = 1 << 20
"""Elements of the largest operand of a case; larger ones take their time."""
