"""Playing a plan's actions on one rank of a pipeline."""
