"""A stage as a sharding problem on its folded graph, and the way back to a plan."""
