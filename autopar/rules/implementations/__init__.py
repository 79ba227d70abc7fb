"""The ways in which ops run when an axis splits them: a row each."""
