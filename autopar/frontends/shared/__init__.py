"""What both frontends share: what a capture is, where lines stand, what a function reaches."""
