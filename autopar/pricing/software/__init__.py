"""What the software of published runs makes of a graph, where that differs from what is emitted."""
