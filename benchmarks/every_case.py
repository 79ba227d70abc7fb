"""How tests are asked for every case, of which the suite runs a few (`tests.sampling`)."""

EVERY_CASE = "AUTOPAR_EVERY_CASE"
"""Of the environment, so that the processes of a test see it too."""
