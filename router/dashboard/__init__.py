"""The page on which operators see the cluster."""
