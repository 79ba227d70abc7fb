"""Files that a person reads or writes: the plan's folder, cluster and architecture files."""
