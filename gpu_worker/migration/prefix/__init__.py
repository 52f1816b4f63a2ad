"""Blocks of prefixes that other workers have."""
