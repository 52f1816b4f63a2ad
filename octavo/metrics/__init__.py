"""Metrics: what routers and workers tell monitoring of themselves, in the form that Prometheus reads."""
