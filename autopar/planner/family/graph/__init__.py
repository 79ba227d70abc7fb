"""An architecture's figures as the `Graph` that a frontend makes of its model."""
