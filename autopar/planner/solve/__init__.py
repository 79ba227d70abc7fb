"""One mesh solved, and what stands so far."""
