"""Starting jobs on this machine, and telling how they ended."""
