"""Plans as settings of other trainers and launchers: one file for each, text in and text out."""
