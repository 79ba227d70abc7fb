"""What units of a model cost before it is cut, sharded or scheduled."""
