"""Blocks in the memory of a device and of its host, and copies between them."""
