"""A plan against the model that it was made from."""
