"""From a plan and a graph to every sharding, collective and byte of state."""
