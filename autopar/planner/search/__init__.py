"""The search over layouts and parts of the cluster."""
