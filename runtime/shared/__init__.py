"""What the runtimes of both frameworks share: what is on disk, settings, the model of a script."""
