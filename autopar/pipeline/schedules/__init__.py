"""Every schedule that has a name: for ranks and microbatches, who does what in which order."""
