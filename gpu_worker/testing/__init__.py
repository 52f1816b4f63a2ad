"""Runners without a model, whose output a test can compute without them."""
