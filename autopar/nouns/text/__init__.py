"""The text form of graphs: one line an op, which a person reads and `from_text` parses back."""
