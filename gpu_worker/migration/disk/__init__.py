"""Blocks of the prefix cache in files: they are there after a restart, and for other workers of this host."""
