"""Pipelines: schedules as lists of actions, what proves them, and the timeline that plays them."""
