"""Plans made inside a user's own Python program, beside the command line and its files."""
