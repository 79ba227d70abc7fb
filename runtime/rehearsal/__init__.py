"""A plan's step without its devices: what would mix, wait, race or be refused, by line."""
