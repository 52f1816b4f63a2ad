"""Prefixes that operators have named, and how they stay warm."""
