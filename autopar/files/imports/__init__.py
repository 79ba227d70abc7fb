"""Layouts of runs that exist, read from the settings of other trainers: one file for each."""
