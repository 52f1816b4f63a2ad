"""Paths beside those that answer requests."""
