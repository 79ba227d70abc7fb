"""What is asked: pins, candidates, the cluster in parts."""
