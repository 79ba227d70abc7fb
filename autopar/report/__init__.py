"""What people read about a plan: the summary, why it is so, and how two plans differ."""
